"""The output object: the earlier of two ends wins, everything is cut there, and there is one end."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engine import write_model
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpd.core.effects import Finished, Prefilled
from radixpd.core.journey import Journey
from radixpd.core.request import Finish
from radixpd.core.step import TokenLogprobs
from radixpd.errors import BadRequest, EngineFailed, Overloaded
from radixpd.runtime.messages import Stop
from radixpd.runtime.output import Output
from radixpd.text.detokenizer import Detokenizer
from radixpd.text.stop import StopRules
from radixpd.text.tokenizer import load_tokenizer


class Observed:
    def __init__(self):
        self.tokens, self.ends, self.retractions = 0, 0, []

    def first_token(self, output):
        self.tokens += 1

    def next_tokens(self, seconds, count):
        self.tokens += count

    def ended(self, output):
        self.ends += 1

    def left(self, output, retractions):
        self.retractions.append(retractions)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_model(tmp_path_factory.mktemp("model")))


def make(tokenizer, *, stop=(), keep_stop=False):
    wakes = []
    output = Output(
        rid="r", group="r", sample=0, prompt=np.array([1], dtype=np.int32), keep_stop=keep_stop, observer=Observed(),
        detokenizer=Detokenizer(tokenizer, rules=StopRules(stop), keep_stop=keep_stop), wake=wakes.append,
    )  # fmt: skip
    return output, wakes


def receive(output, tokenizer, text):
    for token in tokenizer.encode(text).tolist():
        output.receive(token, TokenLogprobs(-1.0, np.empty(0), np.empty(0), np.empty(0)))


def ended(kind, completion, matched=None, status=200):
    return Finished("r", Finish(kind, matched=matched, message="why", status=status), 1, completion, 5, 0, Journey(prompt_tokens=1))


def test_a_match_tells_the_brain_and_ends_the_output_at_once(tokenizer) -> None:
    output, _ = make(tokenizer, stop=("ST",))
    receive(output, tokenizer, "abST")
    receive(output, tokenizer, "late")
    assert output.settle() == Stop("r", 4, "ST")
    assert (output.text, len(output.ids), len(output.logprobs)) == ("ab", 4, 4)
    assert output.finish == Finish("stop", matched="ST")
    receive(output, tokenizer, "more")
    output.end(ended("length", 8))
    assert output.settle() is None
    assert (output.text, len(output.ids), output.finish.kind) == ("ab", 4, "stop")
    assert output.observer.ends == 1


@pytest.mark.parametrize(("completion", "kind", "text"), [(3, "length", "abS"), (4, "stop", "ab"), (6, "stop", "ab")])
def test_the_earlier_end_wins(tokenizer, completion, kind, text) -> None:
    output, _ = make(tokenizer, stop=("ST",))
    receive(output, tokenizer, "abSTxy")
    output.end(ended("length", completion))
    assert output.settle() is None  # the brain has ended it already
    assert (output.finish.kind, output.text, len(output.ids)) == (kind, text, min(completion, 4))


def test_text_held_for_a_stop_string_comes_with_the_end(tokenizer) -> None:
    output, wakes = make(tokenizer, stop=("STOP",))
    receive(output, tokenizer, "abSTO")
    output.settle()
    assert (output.text, len(wakes)) == ("ab", 1)
    output.end(ended("length", 5))
    output.settle()
    assert output.text == "abSTO"
    assert output.cached == 5
    assert wakes == [False, True]


def test_the_end_token_is_not_text(tokenizer) -> None:
    output, _ = make(tokenizer)
    receive(output, tokenizer, "abc")
    output.end(ended("stop", 3, matched=output.ids[-1]))
    output.settle()
    assert (output.text, len(output.ids)) == ("ab", 3)


@pytest.mark.parametrize(("status", "error"), [(400, BadRequest), (503, Overloaded), (500, EngineFailed), (499, None)])
def test_an_abort_becomes_the_error_of_its_status(tokenizer, status, error) -> None:
    output, _ = make(tokenizer)
    output.start(Prefilled("r", 3, 0.0, Journey(prompt_tokens=1)))
    output.end(ended("abort", 0, status=status))
    output.settle()
    found = output.error()
    assert type(found) is (error or type(None))
    assert isinstance(output.error(aborts=True), error or BadRequest)
    output.fail("too late")
    assert output.finish.message == "why"


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(1, 5), max_size=30), at=st.integers(1, 14), stop=st.sampled_from([(), ("日",), ("cdßx", "z"), ("本",)]))
def test_the_result_does_not_depend_on_how_tokens_arrive(tokenizer, cuts, at, stop) -> None:
    text = "aß日cdßxz 本"
    whole, _ = make(tokenizer, stop=stop)
    receive(whole, tokenizer, text)
    whole.end(ended("length", at))
    whole.settle()
    parts, _ = make(tokenizer, stop=stop)
    ids, stops = tokenizer.encode(text).tolist(), []
    for cut in [*cuts, len(ids)]:
        now, ids = ids[: min(cut, max(0, at - len(parts.ids)))], ids[cut:]
        for token in now:
            parts.receive(token, None)
        if parts.finish is None and len(parts.ids) == at:
            parts.end(ended("length", at))
        stops.append(parts.settle())
        if parts.finish is not None:
            break
    assert (parts.text, parts.ids, parts.finish) == (whole.text, whole.ids, whole.finish)
    assert parts.observer.ends == 1
