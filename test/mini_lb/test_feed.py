"""KV events in order: gaps are asked for again, holes that stay cost knowledge and never the truth, restarts begin anew."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpd.core.page_hash import event_id, page_hashes, root_hash
from radixpd.errors import PeerFailed
from radixpd.mini_lb.feed import Change, Feed, decode
from radixpd.mini_lb.prefix_index import DEVICE, HOST, PrefixIndex
from radixpd.runtime.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch


def _stored(*pages: int, parent: int | None = None) -> list[Change]:
    return [Change(pages, parent, stored=True)]


def _removed(*pages: int) -> list[Change]:
    return [Change(pages)]


def test_what_our_servers_publish_is_read() -> None:
    """The schema of runtime.kv_events, and the ids that the balancer computes itself."""
    hashes = page_hashes(root_hash("model", b""), np.arange(8, dtype="<i4").tobytes(), 16)
    pages = tuple(event_id(each) for each in hashes)
    batch = EventBatch(
        1.5,
        [
            BlockStored([pages[1]], pages[0], [4, 5, 6, 7], 4),
            BlockStored([pages[0]], None, [0, 1, 2, 3], 4, None, "CPU"),
            BlockRemoved([pages[1]]),
            BlockRemoved([pages[0]], "CPU"),
            AllBlocksCleared(),
        ],
    )
    assert decode(msgspec.msgpack.encode(batch)) == [
        Change((pages[1],), pages[0], DEVICE, stored=True),
        Change((pages[0],), None, HOST, stored=True),
        Change((pages[1],), None, DEVICE),
        Change((pages[0],), None, HOST),
        Change(cleared=True),
    ]


def test_other_publishers_are_understood_as_far_as_they_go() -> None:
    """Whole hashes, signed numbers, more fields, events that we do not know, a third field of the batch."""
    whole = bytes(range(32))
    events = [
        ["BlockStored", [whole, -1], whole, [1, 2], 1, None, "GPU", "lora-name", {"extra": 1}],
        ["SomethingNew", 1, 2],
        ["BlockRemoved", [5]],
    ]
    assert decode(msgspec.msgpack.encode([0.0, events, 3])) == [
        Change((int.from_bytes(whole[-8:], "big"), 2**64 - 1), int.from_bytes(whole[-8:], "big"), DEVICE, stored=True),
        Change((5,)),
    ]


RUBBISH = [
    b"", b"\xc1", b"\x01", msgspec.msgpack.encode([1.0]), msgspec.msgpack.encode([1.0, 5]), b"\x91" * 100_000 + b"\xc0",
    msgspec.msgpack.encode([1.0, [["BlockStored", [float("inf")], None, [], 16]]]),
]  # fmt: skip


@pytest.mark.parametrize("payload", RUBBISH)
def test_rubbish_is_refused_by_name(payload: bytes) -> None:
    with pytest.raises(PeerFailed, match="KV events"):
        decode(payload)


def test_a_gap_is_asked_for_once_and_filled_before_what_came_after_it() -> None:
    index = PrefixIndex()
    feed = Feed("w", index)
    feed.live(0, _stored(1, 2), 0)
    assert feed.ask() is None
    feed.live(3, _removed(3), 1)
    assert feed.ask() == 1
    assert feed.ask() is None  # it is under way
    feed.live(4, _stored(9), 2)
    feed.replayed(1, _stored(3, parent=2), 3)
    assert index.match([1, 2, 3]) == {"w": (3, 0)}
    feed.replayed(2, _stored(4, parent=3), 3)
    feed.replayed(3, _removed(3), 3)  # again: already applied from what waited
    feed.replay_ended(3)
    assert (feed.next, feed.ask(), feed.lost) == (5, None, 0)
    assert index.match([1, 2, 3, 4]) == {"w": (2, 0)}
    assert index.match([9]) == {"w": (1, 0)}


def test_a_hole_that_nobody_can_fill_costs_what_was_known() -> None:
    """Page 2 may have been removed in the lost batch: to go on believing in it would send requests astray."""
    index = PrefixIndex()
    feed = Feed("w", index)
    feed.live(0, _stored(1, 2), 0)
    feed.live(5, _stored(7), 1)
    assert feed.ask() == 1
    feed.replayed(4, _stored(6), 2)  # the publisher no longer holds 1 to 3
    feed.replay_ended(2)
    assert feed.lost == 3
    assert index.match([1, 2]) == {}
    assert index.match([6]) == index.match([7]) == {"w": (1, 0)}
    assert (feed.next, feed.ask()) == (6, None)


def test_a_second_gap_during_a_replay_is_asked_for_next() -> None:
    index = PrefixIndex()
    feed = Feed("w", index)
    feed.live(2, _stored(3), 0)
    assert feed.ask() == 0
    feed.live(5, _stored(6), 0)
    for sequence in range(3):
        feed.replayed(sequence, _stored(sequence + 1), 1)
    feed.replay_ended(1)
    assert feed.lost == 0
    assert feed.ask() == 3
    feed.replayed(3, _stored(4), 2)
    feed.replayed(4, _stored(5), 2)
    feed.replay_ended(2)
    assert (feed.next, feed.lost) == (6, 0)
    assert all(index.match([page]) for page in range(1, 7))


def test_a_number_that_goes_back_is_a_new_process() -> None:
    index = PrefixIndex()
    feed = Feed("w", index)
    feed.live(0, _stored(1), 0)
    feed.live(1, _stored(2), 0)
    feed.live(0, _stored(5), 1)
    assert index.match([1]) == index.match([2]) == {}
    assert index.match([5]) == {"w": (1, 0)}
    feed.live(1, [Change(cleared=True)], 2)
    assert index.pages == 0


def test_a_live_batch_that_a_replay_has_overtaken_is_no_new_process() -> None:
    index = PrefixIndex()
    feed = Feed("w", index)
    feed.live(0, _stored(1), 0)
    assert feed.ask(anyway=True) == 1
    feed.replayed(1, _stored(2), 1)
    feed.replay_ended(1)
    feed.live(1, _stored(2), 1)
    assert (feed.next, index.match([1]), index.match([2])) == (2, {"w": (1, 0)}, {"w": (1, 0)})
    feed.live(1, _stored(3), 2)  # a live number twice
    assert index.match([1]) == index.match([2]) == {}


def test_what_clears_everything_needs_nothing_that_came_before() -> None:
    """A flush, or the snapshot for whoever asks too late."""
    index = PrefixIndex()
    feed = Feed("w", index)
    feed.live(0, _stored(1), 0)
    feed.live(7, _stored(9), 0)
    feed.live(9, _stored(11), 0)
    assert feed.behind
    assert feed.ask() == 1
    feed.replayed(8, [Change(cleared=True), *_stored(5), *_stored(9)], 1)
    feed.replay_ended(1)
    assert (feed.next, feed.lost, feed.whole, feed.behind) == (10, 0, True, False)
    assert [page for page in range(12) if index.match([page])] == [5, 9, 11]


def test_a_hole_makes_the_index_less_than_whole_until_all_is_known_again() -> None:
    index = PrefixIndex()
    feed = Feed("w", index)
    feed.live(5, _stored(7), 1)
    assert feed.ask() == 0
    feed.replay_ended(2)
    assert (feed.whole, feed.next) == (False, 6)
    feed.live(6, [Change(cleared=True)], 3)
    assert feed.whole


def test_late_joiners_start_from_a_snapshot() -> None:
    index, other = PrefixIndex(), PrefixIndex()
    feed, late = Feed("w", index), Feed("w", other)
    feed.live(0, _stored(1, 2, 3), 0)
    feed.live(1, _stored(4, parent=2), 0)
    late.live(2, _removed(3), 1)  # the first that the late one hears
    following, held = feed.snapshot()
    late.restore(following, held, 1)
    feed.live(2, _removed(3), 1)
    for pages in ([1, 2, 3], [1, 2, 4]):
        assert other.match(pages) == index.match(pages)
    assert (late.next, late.ask()) == (3, None)
    late.restore(1, [], 2)  # older than what is known
    assert other.match([1, 2, 4]) == {"w": (3, 0)}


def test_a_replay_that_never_ends_costs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixpd.mini_lb.feed.AHEAD", 20)
    index = PrefixIndex()
    feed = Feed("w", index)
    for sequence in range(1, 100):
        feed.live(sequence, _stored(sequence), 0)
        feed.ask()
        assert len(feed._ahead) <= 20
    assert feed.next == 100


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30), st.floats(0, 0.6), st.floats(0, 1))
def test_whatever_is_lost_in_transit_the_index_never_claims_too_much(seed: int, count: int, loss: float, answered: float) -> None:
    """Live batches are dropped by chance, replays answer from a publisher that holds only the latest few."""
    draw = random.Random(seed)
    index, truth, held = PrefixIndex(), set(), {}
    feed = Feed("w", index)
    for sequence in range(count):
        page = draw.randrange(6)
        changes = _removed(page) if page in truth else _stored(page)
        truth ^= {page}
        held[sequence] = changes
        held.pop(sequence - 5, None)
        if draw.random() >= loss:
            feed.live(sequence, changes, sequence)
        if draw.random() < answered and (start := feed.ask()) is not None:
            for known, batch in sorted(held.items()):
                if known >= start:
                    feed.replayed(known, batch, sequence)
            feed.replay_ended(sequence)
    if feed.next == count:  # it has heard of everything
        claimed = {page for page in range(6) if index.match([page])}
        assert claimed <= truth
        assert feed.lost or claimed == truth
