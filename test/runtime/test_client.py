"""The API process's end of the links: nothing is lost, failures reach everybody, replies have deadlines."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
import pytest_asyncio
from fake_engine import FakeEngine

from radixpd.core.effects import Finished, TokensOut
from radixpd.core.journey import Journey
from radixpd.core.request import Finish, SamplingParams
from radixpd.errors import BadRequest, EngineFailed, Overloaded
from radixpd.runtime.client import Client
from radixpd.runtime.messages import Batch, Generate, Load


class Recorded:
    """Stands in for an output: keeps what the client routes to it."""

    def __init__(self, rid):
        self.rid, self.group, self.ids, self.finish, self.failure, self.settled = rid, "group", [], None, None, 0
        self.kept, self.sample, self.journey = not rid.startswith("quiet"), 0, None

    def start(self, effect):
        pass

    def receive(self, token, logprobs):
        self.ids.append(token)

    def end(self, effect):
        self.finish, self.journey = effect.finish, effect.journey

    def settle(self):
        self.settled += 1

    def fail(self, message):
        self.failure = message


@pytest_asyncio.fixture
async def pair(tmp_path):
    client, engine = Client(str(tmp_path)), FakeEngine(str(tmp_path))
    yield client, engine
    client.close()
    engine.close()


def submit(client, *rids, tokens=5):
    outputs = tuple(Recorded(rid) for rid in rids)
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    client.submit(Generate(rids, np.arange(3, dtype=np.int32), params, b"", 0, 0.0), outputs)
    return outputs


async def test_the_first_load_means_ready(pair) -> None:
    client, engine = pair
    assert not client.ready.is_set()
    engine.start()
    await asyncio.wait_for(client.ready.wait(), 5)
    assert client.load.pages == 256


async def test_many_requests_each_get_their_tokens(pair) -> None:
    client, _ = pair
    outputs = [output for index in range(100) for output in submit(client, f"a{index}", f"b{index}", tokens=50)]
    assert client.groups == {"group": {output.rid for output in outputs}}
    await asyncio.wait_for(client.idle(), 20)
    assert all(output.ids == [index % 3 for index in range(50)] and output.finish.kind == "length" for output in outputs)
    assert client.outputs == {}
    assert client.groups == {}
    assert client.unstarted == set()


async def test_the_journeys_of_what_has_ended_are_kept(pair) -> None:
    client, _ = pair
    submit(client, "a", "quiet")
    await asyncio.wait_for(client.idle(), 20)
    (ended,) = client.journeys.of("group")
    assert (ended.rid, ended.finish.kind, ended.completion, ended.journey.prompt_tokens) == ("a", "length", 5, 3)
    submit(client, "b", tokens=2)
    assert client.journeys.of("group") == [], "the name is a new request's"
    await asyncio.wait_for(client.idle(), 20)


async def test_a_flood_of_messages_is_drained_whole(pair) -> None:
    client, engine = pair
    engine.hold()
    (output,) = submit(client, "r")
    for index in range(5000):
        engine._sender.send(Batch(tokens=(TokensOut(("r", "stranger"), np.array([index, 1], dtype=np.int32)),)))
    journey = Journey(prompt_tokens=3)
    ends = (Finished("r", Finish("length"), 3, 5000, 0, 0, journey), Finished("stranger", Finish("length"), 1, 1, 0, 0, journey))
    engine._sender.send(Batch(finished=ends))
    await asyncio.wait_for(client.idle(), 10)
    assert output.ids == list(range(5000))


async def test_failure_reaches_outputs_questions_and_later_requests(pair) -> None:
    client, engine = pair
    engine.hold()
    (output,) = submit(client, "r")
    question = asyncio.create_task(client.control("never answered"))
    await asyncio.sleep(0)
    engine.fail("gone")
    with pytest.raises(EngineFailed, match="gone"):
        await question
    assert output.failure == "gone"
    assert client.groups == {}
    client.fail("again")
    assert client.failure == "gone"
    with pytest.raises(EngineFailed, match="gone"):
        submit(client, "late")
    with pytest.raises(EngineFailed):
        await client.control("state")


async def test_questions(pair) -> None:
    client, engine = pair
    engine.hold()
    assert await client.control("state") == {"in_flight": 0, "requests": []}
    submit(client, "r")
    with pytest.raises(BadRequest, match="requests are running"):
        await client.control("flush_cache")
    with pytest.raises(Overloaded, match="did not answer"):
        await client.control("never answered", seconds=0.01)


async def test_a_message_that_cannot_be_handled_fails_everything_at_once(pair) -> None:
    client, engine = pair
    engine.hold()
    (output,) = submit(client, "r")
    caught = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: caught.append(context["exception"]))
    output.receive = None
    engine._sender.send(Batch(tokens=(TokensOut(("r",), np.array([1], dtype=np.int32)),)))
    await asyncio.wait_for(client.failed.wait(), 5)
    assert output.failure
    assert caught


@pytest_asyncio.fixture
async def watched(tmp_path, monkeypatch):
    """A client with short ticks that gives its scheduler 10 of them."""
    monkeypatch.setattr("radixpd.runtime.client.TICK", 0.02)
    client, engine = Client(str(tmp_path), watchdog=0.2), FakeEngine(str(tmp_path))
    yield client, engine
    client.close()
    engine.close()


async def test_a_silent_scheduler_is_unresponsive_then_failed(watched) -> None:
    client, engine = watched
    engine.start()
    await asyncio.wait_for(client.ready.wait(), 5)
    engine.hold()
    (output,) = submit(client, "r")
    assert not client.unresponsive
    async with asyncio.timeout(5):
        while not client.unresponsive:
            await asyncio.sleep(0)
        assert not client.failed.is_set()
        await client.failed.wait()
    assert output.failure == client.failure == "the scheduler process has not answered for 0.2 s (--watchdog-timeout)"


async def test_any_message_of_the_scheduler_is_a_sign_of_life(watched) -> None:
    client, engine = watched
    engine.start()
    await asyncio.wait_for(client.ready.wait(), 5)
    async with asyncio.timeout(5):
        while not client.unresponsive:
            await asyncio.sleep(0)
        engine._sender.send(Batch())
        while client.unresponsive:
            await asyncio.sleep(0)
    assert not client.failed.is_set()


async def test_silence_before_ready_is_no_failure(watched) -> None:
    client, _ = watched
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.failed.wait(), 0.5)
    assert not client.unresponsive


async def test_a_paused_api_process_does_not_blame_its_scheduler(watched) -> None:
    """The pause is long enough for 50 ticks, but the loop did not run."""
    client, engine = watched
    engine.start()
    await asyncio.wait_for(client.ready.wait(), 5)
    time.sleep(1)  # holds up this loop as a pause does
    for _ in range(3):
        await asyncio.sleep(0)
    assert not client.failed.is_set()
    assert not client.unresponsive


async def test_throughput_forgets(pair, monkeypatch) -> None:
    client, _engine = pair
    now = 100.0
    monkeypatch.setattr("radixpd.runtime.client.time.monotonic", lambda: now)
    for total, at in ((0, 100.0), (500, 102.0)):
        now = at
        client._route(Load(engine_load(total)))
    now = 105.0
    assert client.throughput() == 100.0
    now = 200.0
    assert client.throughput() == 0.0


def engine_load(total):
    from radixpd.core.load import LoadSnapshot

    return LoadSnapshot(generated_tokens_total=total)
