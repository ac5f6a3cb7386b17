"""Sixty requests for a prefill/decode pair, as mixed as clients are, and what one aggregated server answers to each alone.

A thread is a list of requests that one client sends in turn; conversations go on from what was answered, so the bodies are made while the
reference answers. `Case.check` is the rule for equality: everything in an answer but names, times and cache hits is equal, scores within a
tolerance. `test_pd` asks them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from e2e.reference import TOLERANCE, Reference, answers, solo
from e2e.servers import ASCII_BIAS, Server

__all__ = ["COUNT", "Case", "equal", "ids", "threads"]

COUNT = 60
EOS = "2"
GREEDY = {"temperature": 0, "ignore_eos": True}
VOLATILE = {"id", "created", "e2e_latency", "cached_tokens", "prompt_tokens_details", "kv_journey"}
NATIVE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"


def ids(seed: int, length: int) -> list[int]:
    """Token ids of the tiny model that look random, the same in each run."""
    return [3 + (seed * 7919 + i * i * 31 + i * 17) % 250 for i in range(length)]


@dataclass(frozen=True)
class Case:
    """One request and its answer. `references` judge near ties of native answers."""

    name: str
    route: str
    body: dict[str, Any]
    expected: Any
    stream: bool = False
    references: list[Reference] = field(default_factory=list)

    def check(self, found: Any) -> bool:
        """Assert that `found` is the answer; True if that needed the excuse of a near tie."""
        excused = [reference.check(output) for reference, output in zip(self.references, answers(found), strict=bool(self.references))]
        if not any(excused):
            equal(found, self.expected, self.name)
        return any(excused)


def equal(found: Any, expected: Any, where: str) -> None:
    """Assert that two answers agree in all that does not change from run to run."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), where
        assert found.keys() - VOLATILE == expected.keys() - VOLATILE, where
        for name in expected.keys() - VOLATILE:
            equal(found[name], expected[name], f"{where}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), f"{where}: {found} instead of {expected}"
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            equal(one, other, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert abs(found - expected) < TOLERANCE, f"{where}: {found} instead of {expected}"
    else:
        assert found == expected, f"{where}: {found!r} instead of {expected!r}"


def threads(server: Server) -> list[list[Case]]:
    """All requests, answered by this server one by one."""
    known = _Known(server)
    singles = [*_plain(), *_sampled(), *_scored(), *_short(), *_stopped(known), *_openai()]
    conversations = [_native_turns(known, seed) for seed in (71, 72)] + [_chat_turns(known)]
    return [[known.case(*single)] for single in singles] + conversations


@dataclass(frozen=True)
class _Known:
    """The server that knows."""

    server: Server

    def case(self, name: str, route: str, body: dict[str, Any], stream: bool = False) -> Case:
        self.server.flush()
        answer = self.server.post(route, body)
        assert answer.status == 200, (name, answer.body)
        return Case(name, route, body, answer.json, stream, solo(self.server, body) if route == NATIVE else [])


Single = tuple[str, str, dict[str, Any]] | tuple[str, str, dict[str, Any], bool]


def _native(prompt: list[int], tokens: int, *, more: dict[str, Any] | None = None, **sampling: Any) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": {**GREEDY, "max_new_tokens": tokens, **sampling}, **(more or {})}


def _openai_body(prompt: Any, tokens: int, **fields: Any) -> dict[str, Any]:
    key = "messages" if isinstance(prompt, list) and isinstance(prompt[0], dict) else "prompt"
    return {"model": "tiny", key: prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}


def _plain() -> Iterator[Single]:
    """Lengths around pages and chunks, prefixes that are shared, and each of a stream."""
    for index, length in enumerate((1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200, 511, 512, 513, 700)):
        yield f"plain-{length}", NATIVE, _native(ids(10 + index, length), 24), index % 2 == 0
    for index in range(4):
        yield f"shared-{index}", NATIVE, _native(ids(30, 150) + ids(31 + index, 10 + index), 32), index % 2 == 0
    yield "text", NATIVE, {"text": "Once upon a time, in a land of tokens, " * 3, "sampling_params": {**GREEDY, "max_new_tokens": 20}}
    yield "many", NATIVE, {"input_ids": [ids(40, 40), ids(41, 3), ids(42, 90)], "sampling_params": {**GREEDY, "max_new_tokens": 12}}


def _sampled() -> Iterator[Single]:
    """Several outputs, seeds, penalties."""
    seeded = {"temperature": 1, "ignore_eos": True}
    yield "n-2", NATIVE, _native(ids(50, 40), 32, **seeded, sampling_seed=7, n=2)
    yield "n-2 on a page's edge", NATIVE, _native(ids(51, 64), 32, **seeded, sampling_seed=8, n=2)
    yield "n-2 with scores", NATIVE, _native(ids(52, 90), 20, **seeded, sampling_seed=9, n=2, more={"return_logprob": True})
    yield "n-2 greedy", NATIVE, _native(ids(53, 5), 20, n=2)
    yield "seed", NATIVE, _native(ids(54, 70), 40, **seeded, sampling_seed=11), True
    yield "frequency", NATIVE, _native(ids(55, 30), 40, frequency_penalty=0.5)
    yield "repetition", NATIVE, _native(ids(56, 50), 40, repetition_penalty=1.3), True
    yield "minimum", NATIVE, _native(ids(57, 20), 20, ignore_eos=False, min_new_tokens=10, logit_bias={EOS: 30})


def _scored() -> Iterator[Single]:
    """Log-probabilities of outputs and prompts."""
    wish: dict[str, Any] = {"return_logprob": True, "return_text_in_logprobs": True}
    yield "scores", NATIVE, _native(ids(60, 50), 16, more=wish)
    yield "top scores", NATIVE, _native(ids(61, 50), 16, more={**wish, "top_logprobs_num": 3}), True
    yield "prompt scores", NATIVE, _native(ids(62, 150), 16, more={**wish, "logprob_start_len": 0, "top_logprobs_num": 2})
    yield "late prompt scores", NATIVE, _native(ids(63, 150), 16, more={**wish, "logprob_start_len": 40, "token_ids_logprob": [5, 9]})


def _short() -> Iterator[Single]:
    """One token, none, and an end of sequence that comes first."""
    yield "one", NATIVE, _native(ids(80, 60), 1), True
    yield "one scored", NATIVE, _native(ids(81, 33), 1, more={"return_logprob": True, "logprob_start_len": 0})
    yield "none", NATIVE, _native(ids(82, 60), 0)
    yield "none scored", NATIVE, _native(ids(83, 60), 0, more={"return_logprob": True, "logprob_start_len": 0})
    yield "EOS first", NATIVE, _native(ids(84, 40), 8, ignore_eos=False, logit_bias={EOS: 100}), True
    yield "EOS ignored", NATIVE, _native(ids(85, 40), 8, logit_bias={EOS: 100}), True
    yield "stop token first", NATIVE, _native(ids(86, 40), 8, logit_bias={"40": 100}, stop_token_ids=[40])


def _stopped(known: _Known) -> Iterator[Single]:
    """Stop strings spread over two tokens; the first place where they stand ends the output."""
    for seed in (90, 91):
        body = _native(ids(seed, 60), 60, logit_bias=ASCII_BIAS)
        text = known.server.generate(**body)["text"]
        yield f"stop-{seed}", NATIVE, _native(ids(seed, 60), 60, logit_bias=ASCII_BIAS, stop=["never", text[20:22]]), seed == 90


def _openai() -> Iterator[Single]:
    """The other two routes."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name the colours of the rainbow."}]
    yield "completion", COMPLETIONS, _openai_body("The quick brown fox jumps over " * 4, 24)
    yield "completion n-2", COMPLETIONS, _openai_body("Twice told tales", 16, temperature=1, seed=5, n=2)
    yield "completion scores", COMPLETIONS, _openai_body("Count with me: one, two", 12, logprobs=2)
    yield "completion echo", COMPLETIONS, _openai_body("Say it again, all of it", 0, echo=True, logprobs=1)
    yield "chat", CHAT, _openai_body(chat, 24)
    yield "chat stop", CHAT, _openai_body(chat, 24, logit_bias={"40": 100}, stop=["FFF"])
    yield "chat scores", CHAT, _openai_body(chat, 8, logprobs=True, top_logprobs=3)
    yield "chat EOS first", CHAT, _openai_body(chat, 8, ignore_eos=False, logit_bias={EOS: 100})


def _native_turns(known: _Known, seed: int) -> list[Case]:
    """A conversation of ids: each turn is all that was said, and something new."""
    turns, prompt = [], ids(seed, 50)
    for turn in range(3):
        turns.append(known.case(f"conversation {seed}, turn {turn + 1}", NATIVE, _native(prompt, 20), turn % 2 == 1))
        prompt = prompt + turns[-1].expected["output_ids"] + ids(seed + 10 * turn, 23)
    return turns


def _chat_turns(known: _Known) -> list[Case]:
    """A conversation of messages; the model writes printable text, so that it comes back as it went."""
    turns, said = [], [{"role": "user", "content": "Tell me about the sea."}]
    for turn in range(3):
        turns.append(known.case(f"chat, turn {turn + 1}", CHAT, _openai_body(list(said), 20, logit_bias=ASCII_BIAS)))
        said += [{"role": "assistant", "content": turns[-1].expected["choices"][0]["message"]["content"]}]
        said += [{"role": "user", "content": f"And then? ({turn})"}]
    return turns
