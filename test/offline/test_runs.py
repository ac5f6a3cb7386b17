"""Batches on the loop of a fake engine: order, bounds, what happens to a batch that is given up, streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fake_engine import FakeEngine, make_resolved, write_model

from radixpd.config.settings import SchedulerSettings
from radixpd.errors import BadRequest, EngineFailed
from radixpd.offline.batch import Batch
from radixpd.offline.runs import Runs
from radixpd.runtime.client import Client
from radixpd.runtime.messages import Abort, Generate
from radixpd.server.process import build_service, open_service


class Desk:
    """A fake engine and the runs on it. With two slots there is room for eight outputs."""

    def __init__(self, directory: Path, links: Path) -> None:
        self.client = Client(str(links))
        self.engine = FakeEngine(str(links), max_running=2)
        self.engine.taken_in = lambda steps: self.client.load.steps_total >= steps
        resolved = make_resolved(directory, scheduler=SchedulerSettings(max_running_requests=2))
        self.service = build_service(resolved, self.client)
        self.runs = Runs(self.service)

    def batch(self, prompts: Any, sampling: Any = None, **options: Any) -> Batch:
        return self.runs.prompts(prompts, None, sampling, options)

    async def texts(self, prompts: Any, sampling: Any = None, **options: Any) -> list[str]:
        return [answer["text"] for answer in await self.runs.answers(self.batch(prompts, sampling, **options))]

    async def idle(self) -> None:
        await asyncio.wait_for(self.client.idle(), 5)


@pytest_asyncio.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    (tmp_path / "links").mkdir()
    desk = Desk(write_model(tmp_path), tmp_path / "links")
    desk.engine.start()
    await open_service(desk.service)
    desk.engine.seen.clear()
    yield desk
    desk.client.close()
    desk.engine.close()


async def test_answers_come_in_the_order_of_the_prompts_with_their_samples(desk: Desk) -> None:
    prompts = ["a long one, so that it ends last", "b", "cc", "ddd"]
    assert await desk.texts(prompts) == prompts
    answers = await desk.runs.answers(desk.batch(prompts, [{}, {"n": 2}, {}, {"max_new_tokens": 2}], rid=list("wxyz")))
    assert [answer["text"] for answer in answers] == [prompts[0], "b", "b", "cc", "dd"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["w", "x-0", "x-1", "y", "z"]
    assert await desk.texts([]) == []


async def test_however_many_prompts_a_bounded_number_is_in_the_engine(desk: Desk) -> None:
    most = 0

    def look(steps: int) -> bool:
        nonlocal most
        most = max(most, len(desk.client.outputs))
        return desk.client.load.steps_total >= steps

    desk.engine.taken_in = look
    prompts = [f"{index}" for index in range(300)]
    sampling = [{"n": 2 if index % 7 == 0 else 1} for index in range(300)]
    both = await asyncio.gather(desk.texts(prompts, sampling), desk.texts(["late"]))
    assert both[1] == ["late"]
    assert len(both[0]) == 300 + 43
    assert most == desk.runs.room == 8


async def test_nothing_starts_before_every_prompt_is_known_to_fit(desk: Desk) -> None:
    with pytest.raises(BadRequest, match=r"^prompt 2: this server's maximum context length is 512 tokens") as error:
        await desk.texts(["a", "b", "c" * 600, "d"])
    assert error.value.code == "context_length_exceeded"
    assert desk.engine.of(Generate) == []
    with pytest.raises(BadRequest, match=r"^this server's maximum"):
        await desk.texts("c" * 600)


async def test_a_batch_that_is_cancelled_has_left_the_engine_when_it_ends(desk: Desk) -> None:
    desk.engine.hold()
    batch = asyncio.create_task(desk.texts([f"{index}" for index in range(50)]))
    await desk.engine.received(Generate, 8)
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    assert desk.client.outputs == {}
    assert len(desk.engine.of(Generate)) == len(desk.engine.of(Abort)) == 8
    desk.engine.release()
    assert await desk.texts(["room is back"] * 20) == ["room is back"] * 20


async def test_a_prompt_that_fails_ends_its_batch_and_is_named(desk: Desk) -> None:
    desk.engine.hold()
    batch = asyncio.create_task(desk.texts(["a", "b", "c"], rid=["x", "y", "z"]))
    await desk.engine.received(Generate, 3)
    desk.client.abort("y", "the brain says no", 400)
    with pytest.raises(BadRequest, match=r"^prompt 1: the brain says no$"):
        await batch
    await desk.idle()
    assert {order.rid for order in desk.engine.of(Abort)} == {"x", "y", "z"}


async def test_an_abort_by_name_is_an_answer(desk: Desk) -> None:
    desk.engine.hold()
    batch = asyncio.create_task(desk.runs.answers(desk.batch(["a", "b"], rid=["x", "y"])))
    await desk.engine.received(Generate, 2)
    assert desk.service.manager.abort("x") == 1
    await desk.engine.received(Abort)
    desk.engine.release()
    first, second = await batch
    assert first["meta_info"]["finish_reason"]["type"] == "abort"
    assert second["text"] == "b"


async def test_a_failed_engine_ends_what_waits_and_what_comes(desk: Desk) -> None:
    desk.engine.hold()
    waiting = [asyncio.create_task(desk.texts([f"{index}" for index in range(50)])) for _ in range(2)]
    await desk.engine.received(Generate, 8)
    desk.engine.fail("the runner is gone")
    for batch in waiting:
        with pytest.raises(EngineFailed, match=r"^the runner is gone$"):
            await asyncio.wait_for(batch, 5)
    with pytest.raises(EngineFailed, match=r"^the runner is gone$"):
        await desk.texts("late")


async def test_a_stream_has_events_of_all_its_outputs(desk: Desk) -> None:
    stream = desk.runs.stream(desk.batch(["abc", "de"]))
    events: list[dict[str, Any]] = []
    while (news := await stream.next()) is not None:
        events += news
    await stream.close()
    for index, text in enumerate(("abc", "de")):
        mine = [event for event in events if event["index"] == index]
        assert [event["text"] for event in mine] == [text[: end + 1] for end in range(len(text))] + [text]
        assert [event["meta_info"]["finish_reason"] is None for event in mine] == [True] * len(text) + [False]
    assert "index" not in (await desk.runs.stream(desk.batch("abc")).next())[0]  # type: ignore[index]
    with pytest.raises(BadRequest, match="at most 8 outputs at once, got 9"):
        await desk.runs.stream(desk.batch(["a"] * 9)).next()


async def test_a_stream_that_is_closed_or_cancelled_leaves_nothing_running(desk: Desk) -> None:
    for _ in range(10):  # more than there is room for
        stream = desk.runs.stream(desk.batch("abc", {"ignore_eos": True, "max_new_tokens": 400}))
        assert await stream.next()
        await stream.close()
        assert desk.client.outputs == {}
    stream = desk.runs.stream(desk.batch("abc", {"ignore_eos": True, "max_new_tokens": 400}))
    assert await stream.next()
    desk.engine.hold()
    pull = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    pull.cancel()
    await stream.close()  # waits for the pull to be over
    assert pull.cancelled()
    assert desk.client.outputs == {}
    unused = desk.runs.stream(desk.batch("abc"))
    await unused.close()
    assert await unused.next() is None
