"""Streams: text as it grows, for threads and for coroutines, and programs that are given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import radixpd_lang as rx
from gates import LONG, SECONDS, Gate
from radixpd_lang.sampling import Sampling


class Dripping(rx.Fake):
    """Streams one piece for each gate that opens."""

    def __init__(self, gates: list[Gate]) -> None:
        super().__init__()
        self.gates = gates
        self.closed = 0

    async def stream(self, prompt: rx.Prompt, sampling: Sampling, *, name: str | None) -> AsyncGenerator[rx.Delta, None]:
        try:
            for index, gate in enumerate(self.gates):
                yield rx.Delta(await gate(prompt, sampling), {"completion_tokens": index + 1})
        finally:
            self.closed += 1


@rx.function
def answer(s: Any) -> None:
    s += "Q: " + rx.gen("answer") + " End."


def test_the_text_of_a_stream_comes_before_it_ends() -> None:
    backend = Dripping([Gate() for _ in range(3)])
    state = answer.run(backend=backend, stream=True, timeout=SECONDS)
    pieces = state.text_iter("answer")
    for index, gate in enumerate(backend.gates):
        gate.open(f"<{index}>")
        assert next(pieces) == f"<{index}>"
    assert list(pieces) == []
    assert list(state.text_iter()) == ["Q: ", "<0>", "<1>", "<2>", " End."]
    assert state["answer"] == "<0><1><2>"
    assert state.get_meta_info("answer") == {"completion_tokens": 3}
    assert state.text() == "Q: <0><1><2> End."


async def test_coroutines_read_the_same_stream() -> None:
    backend = Dripping([Gate() for _ in range(3)])
    state = answer.run(backend=backend, stream=True, timeout=SECONDS)

    async def read() -> list[str]:
        return [piece async for piece in state.text_async_iter()]

    readers = [asyncio.create_task(read()) for _ in range(2)]
    seen = []
    backend.gates[0].open("<0>")
    async with asyncio.timeout(SECONDS):
        async for text, meta in state.text_async_iter("answer", return_meta_data=True):
            seen.append((text, meta["completion_tokens"]))
            if len(seen) < 3:
                backend.gates[len(seen)].open(f"<{len(seen)}>")
        whole = await asyncio.gather(*readers)
    assert seen == [("<0>", 1), ("<1>", 2), ("<2>", 3)]
    assert whole == [["Q: ", "<0>", "<1>", "<2>", " End."]] * 2


def test_a_run_that_has_ended_can_be_iterated_too() -> None:
    state = answer.run(backend=rx.Fake({"answer": "whole"}), timeout=SECONDS)
    assert list(state.text_iter()) == ["Q: ", "whole", " End."]
    assert list(state.text_iter("answer")) == ["whole"]


@pytest.mark.parametrize("way", ["cancel", "with"])
def test_cancelling_closes_the_stream_and_tells_the_readers(way: str) -> None:
    backend = Dripping([Gate(), Gate()])
    state = answer.run(backend=backend, stream=True, timeout=LONG)
    backend.gates[0].open("a")
    pieces = state.text_iter("answer")
    assert next(pieces) == "a"
    assert backend.gates[1].asked.wait(SECONDS)
    if way == "cancel":
        state.cancel()
    else:
        with state:
            pass
    with pytest.raises(rx.ProgramCancelled):
        list(pieces)
    assert backend.gates[1].cancelled.wait(SECONDS)
    with pytest.raises(rx.ProgramCancelled):
        state["answer"]
    assert isinstance(state.error(), rx.ProgramCancelled)
    assert backend.closed == 1


async def test_a_cancelled_reader_cancels_the_program() -> None:
    backend = Dripping([Gate()])
    state = answer.run(backend=backend, stream=True, timeout=LONG)

    async def read() -> None:
        async for _ in state.text_async_iter("answer"):
            pass

    reader = asyncio.create_task(read())
    await asyncio.to_thread(backend.gates[0].asked.wait, SECONDS)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await asyncio.to_thread(backend.gates[0].cancelled.wait, SECONDS)


def test_a_program_that_is_cancelled_before_it_asks() -> None:
    gate, go = Gate(), Gate()

    def body(s: rx.ProgramState) -> None:
        assert go.asked.wait(SECONDS)
        s += rx.gen("x")
        s["x"]

    state = rx.function(body).run(backend=rx.Fake({"x": gate}), stream=True, timeout=LONG)
    state.cancel()
    go.asked.set()
    with pytest.raises(rx.ProgramCancelled):
        list(state.text_iter())
    assert not gate.asked.is_set()


def test_an_error_in_mid_stream_comes_after_the_text_before_it() -> None:
    class Breaking(rx.Fake):
        async def stream(self, prompt: rx.Prompt, sampling: Sampling, *, name: str | None) -> AsyncGenerator[rx.Delta, None]:
            yield rx.Delta("half")
            raise rx.BackendError("connection lost")

    state = answer.run(backend=Breaking(), stream=True, timeout=SECONDS)
    pieces = state.text_iter("answer")
    assert next(pieces) == "half"
    with pytest.raises(rx.ProgramError, match="gen 'answer': connection lost"):
        next(pieces)


def test_readers_of_a_stream_get_the_programs_own_error() -> None:
    def body(s: rx.ProgramState) -> None:
        s += "some"
        raise ZeroDivisionError("mine")

    state = rx.function(body).run(backend=rx.Fake(), stream=True, timeout=SECONDS)
    with pytest.raises(rx.ProgramError, match=r"test_lang_streams.py:\d+: ZeroDivisionError: mine"):
        list(state.text_iter())
    with pytest.raises(ZeroDivisionError):
        state["never"]


def test_a_variable_that_a_stream_never_sets() -> None:
    state = answer.run(backend=rx.Fake(), stream=True, timeout=SECONDS)
    with pytest.raises(KeyError, match="'other' has been set; there are: answer"):
        list(state.text_iter("other"))


async def test_a_coroutine_can_wait_for_a_variable_that_comes_later() -> None:
    gate = Gate()

    def body(s: rx.ProgramState) -> None:
        s += rx.gen("first")
        s += s["first"] + rx.gen("second")

    state = rx.function(body).run(backend=Slow(gate), stream=True, timeout=SECONDS)
    reader = asyncio.ensure_future(anext(state.text_async_iter("second")))
    await asyncio.to_thread(gate.asked.wait, SECONDS)
    gate.open("1")
    assert await asyncio.wait_for(reader, SECONDS) == "2"


class Slow(rx.Fake):
    """Waits before the first variable."""

    def __init__(self, gate: Gate) -> None:
        super().__init__({"second": "2"})
        self.gate = gate

    async def stream(self, prompt: rx.Prompt, sampling: Sampling, *, name: str | None) -> AsyncGenerator[rx.Delta, None]:
        if name == "first":
            yield rx.Delta(await self.gate(prompt, sampling))
        else:
            async for delta in super().stream(prompt, sampling, name=name):
                yield delta
