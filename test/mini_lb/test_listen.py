"""Workers' events over real sockets: late joiners, publishers that die, fall silent, start again or send rubbish; and the cards that say
where they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import zmq
from hypothesis import given
from hypothesis import strategies as st
from mini_lb.lb_stubs import until

from radixpd.core.effects import CacheCleared, CacheEvent, PagesRemoved, PagesStored
from radixpd.mini_lb import listen
from radixpd.mini_lb.card import Endpoints, read_card
from radixpd.mini_lb.feed import Feed
from radixpd.mini_lb.listen import Listeners
from radixpd.mini_lb.prefix_index import PrefixIndex
from radixpd.runtime.kv_events import Publisher

WORKER = "http://127.0.0.1:1"


def stored(*pages: int, parent: int | None = None) -> PagesStored:
    hashes = tuple(page.to_bytes(32, "big") for page in pages)
    return PagesStored(hashes, None if parent is None else parent.to_bytes(32, "big"), np.zeros(len(pages), np.int32))


def removed(*pages: int) -> PagesRemoved:
    return PagesRemoved(tuple(page.to_bytes(32, "big") for page in pages))


class Source:
    """A worker's publisher, whose replays are answered while `answers` is true."""

    def __init__(self, directory: Path, *, replay: bool = True, **options: Any) -> None:
        self.endpoints = Endpoints(f"ipc://{directory}/live", f"ipc://{directory}/replay" if replay else "", "kv")
        self.context: zmq.Context[Any] = zmq.Context()
        self._options = options
        self.answers = True
        self.publisher: Publisher
        self.start()
        self._task = asyncio.create_task(self._serve())

    def start(self) -> None:
        """A process that counts from 0."""
        names = self.endpoints
        self.publisher = Publisher(
            self.context, endpoint=names.live, replay_endpoint=names.replay, topic=names.topic, page_size=1, **self._options
        )

    def tell(self, *events: CacheEvent) -> None:
        self.publisher.publish(events, unix_time=0.0)

    async def _serve(self) -> None:
        while True:
            if self.answers:
                self.publisher.answer_replays()
            await asyncio.sleep(0.002)  # what a scheduler's poll does

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.publisher.close()
        self.context.destroy(linger=0)


class Ears:
    """Listeners and what they have heard of one worker."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.all = Listeners(lambda name: Feed(name, self.index))

    def hears(self) -> bool:
        return self.all.hears(WORKER)

    def known(self) -> set[int]:
        """Which of the first pages the worker is believed to have, each the first of its chain."""
        return {page for page in range(100) if self.index.match([page])}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BEAT", 0.02), ("DEADLINE", 0.3), ("FIRST_PAUSE", 0.02), ("LAST_PAUSE", 0.1), ("RECONNECT_MS", (10, 50))):
        monkeypatch.setattr(listen, name, value)


@pytest.fixture
def ears() -> Iterator[Ears]:
    made = Ears()
    yield made
    made.all.close()


@pytest_asyncio.fixture
async def source(tmp_path: Path) -> Any:
    """`source(**options)`: a running publisher."""
    made: list[Source] = []

    def start(**options: Any) -> Source:
        made.append(Source(tmp_path, **options))
        return made[-1]

    yield start
    for each in made:
        await each.close()


async def test_who_joins_late_learns_all_and_then_follows(ears: Ears, source: Callable[..., Source]) -> None:
    worker = source()
    worker.tell(stored(1), stored(2))
    worker.tell(removed(2))
    ears.all.told(WORKER, worker.endpoints)
    assert not ears.hears()
    await until(ears.hears, "it has heard all")
    assert ears.known() == {1}
    worker.tell(stored(3), stored(4, 5, parent=3))
    await until(lambda: ears.hears() and ears.index.match([3, 4, 5]) == {WORKER: (3, 0)}, "what is new is heard")
    worker.tell(CacheCleared())
    await until(lambda: not ears.known(), "the flush is heard")
    ears.all.told(WORKER, None)
    assert not ears.hears()


async def test_who_joins_too_late_gets_a_snapshot(ears: Ears, source: Callable[..., Source]) -> None:
    worker = source(buffered=2, cached=lambda: [stored(7), stored(8, parent=7)])
    for page in range(10, 20):
        worker.tell(stored(page))
    ears.all.told(WORKER, worker.endpoints)
    await until(ears.hears, "it has heard all")
    assert ears.known() == {7}
    assert ears.index.match([7, 8]) == {WORKER: (2, 0)}


async def test_a_publisher_that_falls_silent_is_not_believed(ears: Ears, source: Callable[..., Source]) -> None:
    worker = source()
    worker.tell(stored(1))
    ears.all.told(WORKER, worker.endpoints)
    await until(ears.hears, "it has heard all")
    worker.answers = False
    await until(lambda: not ears.hears(), "the silence is noticed")
    assert ears.known() == set()
    worker.answers = True
    await until(ears.hears, "it hears again")
    assert ears.known() == {1}


async def test_a_publisher_that_comes_later_is_heard(ears: Ears, source: Callable[..., Source], tmp_path: Path) -> None:
    ears.all.told(WORKER, Endpoints(f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay", "kv"))
    await until(lambda: ears.all._listeners[WORKER]._silent, "it has been given up")
    worker = source()
    worker.tell(stored(1))
    await until(ears.hears, "it is heard")
    assert ears.known() == {1}


async def test_another_process_under_the_same_name_begins_anew(ears: Ears, source: Callable[..., Source]) -> None:
    worker = source()
    worker.tell(stored(1))
    worker.tell(stored(2))
    ears.all.told(WORKER, worker.endpoints)
    await until(ears.hears, "it has heard all")
    worker.tell(stored(3))
    await until(lambda: 3 in ears.known(), "it is heard live")
    worker.publisher.close()
    worker.start()
    ears.all.told(WORKER, worker.endpoints)  # as the fleet does when the name of the process changes
    assert ears.known() == set()
    worker.tell(stored(5))
    await until(lambda: ears.hears() and ears.known() == {5}, "only the new one's pages are known")


async def test_a_new_process_shows_by_its_numbers_too(ears: Ears, source: Callable[..., Source]) -> None:
    """Before the fleet has seen that its name is another one."""
    worker = source()
    ears.all.told(WORKER, worker.endpoints)
    await until(ears.hears, "it hears")
    for page in range(1, 6):
        worker.tell(stored(page))
        await until(lambda: page in ears.known(), "it is heard")  # noqa: B023
    worker.publisher._held.clear()  # a process that counts from 0, and is heard at once
    worker.publisher._next = 0
    worker.tell(stored(9))
    worker.tell(stored(10))
    await until(lambda: ears.known() == {9, 10} and ears.hears(), "the old one's pages are forgotten")


RUBBISH = [[b"kv", b"12", b""], [b"kv", bytes(8)], [b"kv", bytes(8), b"\xc1"]]


async def test_a_new_process_that_has_told_as_much_shows_too(ears: Ears, source: Callable[..., Source]) -> None:
    """It counts on where the old one was heard last; what it said before that was not heard."""
    worker = source()
    for page in range(1, 6):
        worker.tell(stored(page))
    ears.all.told(WORKER, worker.endpoints)
    await until(lambda: ears.hears() and ears.known() == {1, 2, 3, 4, 5}, "it has heard all")
    worker.answers = False
    worker.publisher.close()
    worker.start()
    for page in (9, 10, 11, 12, 13, 14, 15):
        worker.tell(stored(page))
    worker.answers = True
    await until(lambda: ears.hears() and ears.known() == {9, 10, 11, 12, 13, 14, 15}, "only the new one's pages are known")


@pytest.mark.parametrize("frames", RUBBISH)
async def test_rubbish_ends_it_for_a_while(ears: Ears, source: Callable[..., Source], frames: list[bytes]) -> None:
    worker = source()
    worker.tell(stored(1))
    ears.all.told(WORKER, worker.endpoints)
    await until(ears.hears, "it has heard all")
    worker.publisher._socket.send_multipart(frames)
    await until(lambda: not ears.hears(), "it is not believed")
    await until(ears.hears, "it is heard again")
    assert ears.known() == {1}


async def test_who_answers_well_and_tells_rubbish_is_tried_ever_more_rarely(
    ears: Ears, source: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "BEAT", 0.2)
    worker = source()
    ears.all.told(WORKER, worker.endpoints)
    await until(ears.hears, "it has heard all")
    listener = ears.all._listeners[WORKER]

    def late() -> bool:
        if ears.hears():
            worker.publisher._socket.send_multipart([b"kv", bytes(8), b"\xc1"])
        return listener._pause == listen.LAST_PAUSE

    await until(late, "the longest pause is reached")
    await until(lambda: listener._pause == listen.FIRST_PAUSE and ears.hears(), "without rubbish it works again")


async def test_without_replays_only_who_was_there_from_the_start_knows_all(ears: Ears, source: Callable[..., Source]) -> None:
    worker = source(replay=False)
    ears.all.told(WORKER, worker.endpoints)
    worker.tell(stored(1))

    def late() -> bool:
        worker.tell(stored(2))
        return ears.known() == {2}

    await until(late, "some is heard")
    whole = ears.hears()
    assert whole == (ears.all._listeners[WORKER]._feed.lost == 0)
    worker.tell(CacheCleared(), stored(4))
    await until(ears.hears, "after a flush it knows all")
    assert ears.known() == {4}


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://", "ipc://"])
async def test_an_endpoint_that_is_none_harms_nobody(ears: Ears, endpoint: str) -> None:
    ears.all.told(WORKER, Endpoints(endpoint, endpoint, ""))
    await until(lambda: ears.all._listeners[WORKER]._silent, "it has been given up")
    assert not ears.hears()


# ---- cards ------------------------------------------------------------------------------------------------------------------

INFO = {
    "incarnation": "i", "role": "regular", "model_fingerprint": "f", "text_identity": "t", "tokenizer_directory": "/d", "page_size": 16,
    "max_request_tokens": 100, "more": [1],
}  # fmt: skip


def card(worker: str = WORKER, **fields: Any) -> Any:
    return read_card(msgspec.json.encode({**INFO, **fields}), worker)


@pytest.mark.parametrize(
    ("worker", "bound", "reached"),
    [
        ("http://10.0.0.7:30000", "tcp://*:5557", "tcp://10.0.0.7:5557"),
        ("http://10.0.0.7:30000", "tcp://0.0.0.0:5557", "tcp://10.0.0.7:5557"),
        ("http://host.example:30000", "tcp://[::]:5557", "tcp://host.example:5557"),
        ("http://[::2]:30000", "tcp://*:5557", "tcp://[::2]:5557"),
        ("http://10.0.0.7:30000", "tcp://10.1.0.7:5557", "tcp://10.1.0.7:5557"),
        ("http://localhost:1", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
        ("http://127.0.0.1:1", "ipc:///run/x", "ipc:///run/x"),
        ("http://10.0.0.7:30000", "tcp://127.0.0.1:5557", None),  # nobody but its own machine reaches that
        ("http://10.0.0.7:30000", "ipc:///run/x", None),
        ("http://10.0.0.7:30000", "inproc://x", None),
        ("http://10.0.0.7:30000", "tcp://*:*", None),
        ("http://10.0.0.7:30000", "", None),
    ],
)
def test_what_a_worker_binds_is_looked_for_at_the_worker(worker: str, bound: str, reached: str | None) -> None:
    events = card(worker, kv_events={"endpoint": bound, "replay_endpoint": bound, "topic": "kv"}).events
    assert events == (None if reached is None else Endpoints(reached, reached, "kv"))


def test_a_card_is_ours_or_none() -> None:
    assert card().events is None
    assert card().hashing.page_size == 16
    for wrong in ({"incarnation": ""}, {"model_fingerprint": ""}, {"page_size": 0}, {"page_size": "x"}, {"role": "king"}, {"kv_events": 5}):
        assert card(**wrong) is None


@given(st.binary() | st.from_regex(rb"\{.*\}"))
def test_whatever_a_worker_says_reading_it_never_fails(body: bytes) -> None:
    assert read_card(body, WORKER) is None
