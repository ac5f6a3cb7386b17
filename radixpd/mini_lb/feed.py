"""One worker's KV events, brought into order: what `prefix_index` is told.

Batches are numbered from 0 without holes. A number that is ahead means lost batches: they are asked for again (`ask`), and what came after
waits. When a replay has ended without filling the hole, what the index has of the worker may be false, so it is dropped: an index that
knows less costs a cache hit, one that knows wrongly sends requests astray. Live numbers only grow: one that does not is a new process with
an empty cache. Late joiners ask for everything from 0: they get it, or a batch that clears everything and tells all (or they `restore` a
snapshot). Pure: the caller owns the sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from radixpd.errors import PeerFailed
from radixpd.mini_lb.prefix_index import DEVICE, HOST, PrefixIndex

__all__ = ["Change", "Feed", "decode"]

AHEAD = 10_000  # batches that wait for a replay: as many as a publisher holds
LOW_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Change:
    """Pages came, went, or all are gone (`cleared`)."""

    pages: tuple[int, ...] = ()
    parent: int | None = None
    tier: int = DEVICE
    stored: bool = False
    cleared: bool = False


def decode(payload: bytes) -> list[Change]:
    """The events of one batch, `[ts, [[tag, ...], ...]]`; events and fields of other publishers that mean nothing here are passed over."""
    try:
        batch = msgspec.msgpack.decode(payload)
        return [change for event in batch[1] if (change := _change(event)) is not None]
    except (msgspec.MsgspecError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise PeerFailed(f"KV events that cannot be read: {error}") from None


def _change(event: list[Any]) -> Change | None:
    match event:
        case ["BlockStored", list(hashes), parent, _, _, *rest]:
            medium = rest[1] if len(rest) > 1 else None
            return Change(_ids(hashes), None if parent is None else _id(parent), _tier(medium), stored=True)
        case ["BlockRemoved", list(hashes), *rest]:
            return Change(_ids(hashes), tier=_tier(rest[0] if rest else None))
        case ["AllBlocksCleared", *_]:
            return Change(cleared=True)
    return None


def _ids(hashes: Iterable[Any]) -> tuple[int, ...]:
    return tuple(_id(each) for each in hashes)


def _id(value: Any) -> int:
    """Publishers send the low 64 bits, signed or not, or the whole hash."""
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else int(value) & LOW_64


def _tier(medium: Any) -> int:
    return DEVICE if medium is None or str(medium).upper() in ("GPU", "DEVICE", "G1") else HOST


class Feed:
    """The order of one worker's batches. `next`: the number that comes next. `gone` is told of pages that have just gone, with the time."""

    def __init__(self, worker: str, index: PrefixIndex, gone: Callable[[Change, float], None] = lambda change, now: None) -> None:
        self.worker = worker
        self.next = 0
        self.lost = 0  # batches that nobody could replay
        self.whole = True  # the index has all that the worker has, as of batch `next`
        self._newest = -1  # live batch
        self._index = index
        self._gone = gone
        self._ahead: dict[int, list[Change]] = {}
        self._asked: int | None = None  # where the replay under way began

    @property
    def behind(self) -> bool:
        """Whether batches are missing that the worker has published."""
        return bool(self._ahead)

    def ask(self, *, anyway: bool = False) -> int | None:
        """The first batch to ask for again, None while nothing is missing or a replay is under way. Call it after every batch. `anyway`:
        ask for whatever has been published since, though nothing is known to be missing."""
        if self._asked is not None or not (self._ahead or anyway):
            return None
        self._asked = self.next
        return self.next

    def live(self, sequence: int, changes: list[Change], now: float) -> None:
        """A batch that was just published. A replay may have been quicker."""
        if sequence <= self._newest:
            self.restarted()
        self._newest = sequence
        if sequence >= self.next:
            self._take(sequence, changes, now)

    def replayed(self, sequence: int, changes: list[Change], now: float) -> None:
        """A batch that was asked for; what is known already is passed over."""
        if sequence >= self.next:
            self._take(sequence, changes, now)

    def replay_ended(self, now: float) -> None:
        """No more will come of what was asked for. A hole at its very start stays one; a later one is asked for next."""
        asked, self._asked = self._asked, None
        if not self._ahead or asked not in (None, self.next):
            return
        first = min(self._ahead)
        self.lost += first - self.next
        self._index.clear(self.worker)
        self.whole = False
        self.next = first
        self._drain(now)

    def restarted(self) -> None:
        """The worker is another process now, with an empty cache, and counts from 0 again."""
        self._index.clear(self.worker)
        self._ahead.clear()
        self._asked = None
        self._newest = -1
        self.whole = True
        self.next = 0

    def snapshot(self) -> tuple[int, list[tuple[int, int | None, list[int]]]]:
        """For a late joiner: the next batch's number, and all that the worker has."""
        return self.next, self._index.dump(self.worker)

    def restore(self, following: int, held: Iterable[tuple[int, int | None, list[int]]], now: float) -> None:
        """Start from a snapshot of this worker's cache as it was before batch `following`."""
        if following < self.next:
            return
        self._index.clear(self.worker)
        for tier, parent, pages in held:
            self._index.store(self.worker, pages, now, parent=parent, tier=tier)
        self.whole = True
        self.next = following
        self._ahead = {sequence: changes for sequence, changes in self._ahead.items() if sequence >= following}
        self._drain(now)

    def _take(self, sequence: int, changes: list[Change], now: float) -> None:
        if changes and changes[0].cleared:
            # Whatever is missing before it does not matter any more.
            self.next = sequence
            self._ahead = {later: waiting for later, waiting in self._ahead.items() if later > sequence}
        if sequence != self.next:
            self._ahead[sequence] = changes
            if len(self._ahead) > AHEAD:  # a replay that never ends must not cost memory without end
                self._asked = None
                self.replay_ended(now)
            return
        self._apply(changes, now)
        self._drain(now)

    def _drain(self, now: float) -> None:
        while (changes := self._ahead.pop(self.next, None)) is not None:
            self._apply(changes, now)

    def _apply(self, changes: list[Change], now: float) -> None:
        self.next += 1
        for change in changes:
            if change.cleared:
                self._index.clear(self.worker)
                self.whole = True
            elif change.stored:
                self._index.store(self.worker, change.pages, now, parent=change.parent, tier=change.tier)
            else:
                self._index.remove(self.worker, change.pages, tier=change.tier)
            if self._asked is None and not change.stored:  # a replay tells of the past
                self._gone(change, now)
