"""Links: what goes in comes out, over a real ipc socket, and anything else is refused without running it."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from radixpd.core.effects import Finished, Prefilled, TokensOut
from radixpd.core.handoff import Room
from radixpd.core.journey import Journey
from radixpd.core.request import Finish, LogprobParams, SamplingParams
from radixpd.core.step import PromptScores, Score, SlotBegin, StepPlan, StepResult, TokenLogprobs, no_ids
from radixpd.runtime.links import ARRAY, Addresses, Receiver, Sender, decoder, encode
from radixpd.runtime.messages import Batch, Control, FromApi, FromRunner, FromScheduler, Generate, Step, Stepped, ToRunner


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def floats(values: list[Any]) -> np.ndarray:
    return np.array(values, dtype=np.float32)


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="radixpd-") as directory:
        yield Addresses(directory).to_scheduler


def test_a_request_crosses_unchanged(context: zmq.Context[Any], address: str) -> None:
    receiver: Receiver[FromApi] = Receiver(context, address, FromApi, bind=True)
    sender = Sender(context, address)
    room = Room(2**63 - 1, "127.0.0.1:8998")
    params = SamplingParams(stop=("\n",), logit_bias=((3, -1.5),), logprobs=LogprobParams(top=2, start=0, token_ids=(7,)))
    sender.send(Generate(("a", "b"), ids(1, 2, 3), params, b"\x00\xff", -2, 12.5, room))
    sender.send(Control(4, "state"))
    got: list[FromApi] = []
    while len(got) < 2:
        assert receiver.socket.poll(5000), "nothing arrived"
        got += receiver.drain()
    first, second = got
    assert isinstance(first, Generate)
    assert (first.rids, first.params, first.namespace, first.priority, first.arrived) == (("a", "b"), params, b"\x00\xff", -2, 12.5)
    assert first.room == room
    assert first.prompt.dtype == np.int32
    assert first.prompt.tolist() == [1, 2, 3]
    assert second == Control(4, "state")


def test_messages_wait_for_a_peer_that_comes_later(context: zmq.Context[Any], address: str) -> None:
    sender = Sender(context, address)
    for number in range(2000):
        sender.send(Control(number, "state"))
    receiver: Receiver[FromApi] = Receiver(context, address, FromApi, bind=True)
    got: list[FromApi] = []
    while len(got) < 2000:
        assert receiver.socket.poll(5000), "nothing arrived"
        got += receiver.drain()
    assert [message.id for message in got if isinstance(message, Control)] == list(range(2000))


def test_a_plan_with_every_part_crosses_unchanged() -> None:
    plan = StepPlan(
        step=5,
        slots=ids(0, 1),
        starts=ids(0, 9),
        lengths=ids(4, 1),
        sample_rows=ids(1),
        sample_slots=ids(1),
        begins=(SlotBegin(0, ids(9, 8, 7, 6), 4, 1, SamplingParams(seed=2**62)),),
        scores=(Score(0, 1),),
        copies=np.array([[3, 4], [3, 5]], dtype=np.int32),
    )
    got = decoder(ToRunner).decode(encode(Step(plan))).plan
    assert got.begins[0].params == SamplingParams(seed=2**62)
    assert got.begins[0].tokens.tolist() == [9, 8, 7, 6]
    assert got.copies.tolist() == [[3, 4], [3, 5]]
    assert got.page_ids.tolist() == []
    assert got.scores == (Score(0, 1),)


def test_a_result_with_logprobs_crosses_unchanged() -> None:
    scores = PromptScores(1, floats([-1]), ids(4, 5).reshape(1, 2), floats([[-1, -2]]), floats([[]]))
    token = TokenLogprobs(-0.5, ids(7), floats([-0.5]), floats([]))
    got = decoder(FromRunner).decode(encode(Stepped(StepResult(1, ids(7, 8), (token, None), (scores,), 0.25)))).result
    assert got.logprobs[1] is None
    assert got.logprobs[0].top_ids.tolist() == [7]
    assert got.scores[0].asked.shape == (1, 0)
    assert got.scores[0].top_logprobs.dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        got.tokens[0] = 1


def test_effects_cross_unchanged() -> None:
    journey = Journey(prompt_tokens=3, decode_hit_tokens=1, local_computed_tokens=2, queue_ms=0.25, fallback="gone", leg="decode")
    end = Finished("a", Finish("stop", matched="\n"), 3, 2, 0, 0, journey)
    start = Prefilled("a", 1, 0.5, journey)
    got = decoder(FromScheduler).decode(encode(Batch(prefilled=(start,), tokens=(TokensOut(("a",), ids(5)),), finished=(end,))))
    assert (got.prefilled, got.finished) == ((start,), (end,))
    assert got.tokens[0].ids.tolist() == [5]


def stepped(tokens: Any) -> bytes:
    return msgspec.msgpack.encode(["Stepped", {"step": 1, "tokens": tokens}])


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        bytes(range(64)),
        msgspec.msgpack.encode(["Unknown", 1]),
        encode(Control(1, "state")),
        encode(Stepped(StepResult(1, no_ids())))[:-3],
        stepped([1, 2]),
        stepped(msgspec.msgpack.Ext(ARRAY + 1, b"")),
        stepped(msgspec.msgpack.Ext(ARRAY, b"")),
        stepped(msgspec.msgpack.Ext(ARRAY, b"<i4")),
        stepped(msgspec.msgpack.Ext(ARRAY, b"xyz\x01\x01\x00\x00\x00abcd")),
        stepped(msgspec.msgpack.Ext(ARRAY, b"<i4\x01\xff\xff\xff\xffabcd")),
        stepped(msgspec.msgpack.Ext(ARRAY, b"<i4\xff\x01\x00\x00\x00abcd")),
        stepped(msgspec.msgpack.Ext(ARRAY, b"|O8\x01\x01\x00\x00\x00abcdefgh")),
    ],
)
def test_garbage_is_a_validation_error(frame: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decoder(FromRunner).decode(frame)


class Trap:
    """Unpickling this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_a_pickle_is_never_run(context: zmq.Context[Any], address: str, tmp_path: Path) -> None:
    receiver: Receiver[FromApi] = Receiver(context, address, FromApi, bind=True)
    sender = Sender(context, address)
    frame = pickle.dumps(Trap(tmp_path / "sprung"))
    sender.socket.send(frame)
    assert receiver.socket.poll(5000)
    with pytest.raises(msgspec.MsgspecError):
        list(receiver.drain())
    assert not (tmp_path / "sprung").exists()
    pickle.loads(frame)
    assert (tmp_path / "sprung").exists(), "the trap itself works"
