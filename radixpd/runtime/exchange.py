"""The scheduler's ties to the outside of a pair: other servers' brains over `Peers`, its own mover over a link.

The loop calls `take` (what has come goes to the brain), then `order` and `tell` with what the brain wants; a room's end reaches the runner
no later than a plan that may write into its pages. Invariants: the brain hears nothing of a peer before the mover knows the way to it;
after a peer's process was replaced nothing is said to the new one before the mover has taken the old one's access away, so that a late
`PeerLost` never speaks of the new one's rooms. Made by `ties.open_ties`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from radixpd.core.handoff import CancelRoom, ExpectRoom, MoverOrder, PeerLost, PeerMessage, PeerSilent
from radixpd.core.scheduler import Scheduler
from radixpd.runtime.links import Receiver, Sender
from radixpd.runtime.messages import RunnerReady
from radixpd.runtime.mover_messages import Cancel, Dismiss, Dismissed, Expect, FromMover, Meet, Met, Report, report_of
from radixpd.runtime.peers import Identity, News, PeerGone, PeerRefused, Peers, PeerUnreachable, PeerUp

__all__ = ["Exchange", "Half"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Half:
    """One side of a pair. `peers` opens its control link, `identity` says who it is; `writes`: it writes into its peers' pools (prefill),
    else they write into its own."""

    peers: Callable[[], Peers]
    identity: Callable[[RunnerReady], Identity]
    writes: bool


class Exchange:
    """Of one half of a pair; `half`: of each mode, what is different in it. Raises ConfigError when the control link cannot open."""

    def __init__(
        self, mode: str, half: Callable[[str], Half], scheduler: Scheduler, *, to_mover: Sender, from_mover: Receiver[FromMover]
    ) -> None:
        self._half_of = half
        self._half = half(mode)
        self.peers = self._half.peers()
        self._ready: RunnerReady | None = None
        self._scheduler = scheduler
        self._to_mover = to_mover
        self._from_mover = from_mover
        self._ended: list[int] = []
        self._held: dict[str, list[PeerMessage]] = {}  # for peers whose former process has not lost its access yet
        self._met: set[str] = set()
        self._early: dict[str, list[PeerMessage]] = {}  # of peers that the mover has not met yet

    def identify(self, ready: RunnerReady) -> None:
        """See `ties.Ties`."""
        self._ready = ready
        self.peers.identify(self._half.identity(ready))

    def switch(self, mode: str) -> None:
        """See `ties.Ties`. A control link of its own: to everyone who knew this server it has gone, and another one is there."""
        half = self._half_of(mode)
        peers = half.peers()  # first: it may fail
        self.peers.close()
        for peer in self._met:
            self._dismiss(peer)
        self._half, self.peers = half, peers
        if self._ready is not None:
            self.identify(self._ready)

    @property
    def has_news(self) -> bool:
        """See `ties.Ties`."""
        return self.peers.has_news

    def take(self, now: float) -> bool:
        """See `ties.Ties`."""
        moved = False
        for message in self._from_mover.drain():
            moved = True
            match message:
                case Report():
                    report = report_of(message)
                    if isinstance(report, PeerLost):
                        self.peers.doubt(report.peer)
                    self._scheduler.receive(report, "", now)
                case Met(peer):
                    for early in self._early.pop(peer, []):
                        self._scheduler.receive(early, peer, now)
                case Dismissed(peer):
                    self._met.discard(peer)
                    self.tell([(peer, held) for held in self._held.pop(peer, [])], now)
        for peer, event in self.peers.drain(now):
            moved = True
            if isinstance(event, News):
                self._hear(peer, event, now)
            elif peer in self._early:
                self._early[peer].append(event)
            else:
                self._scheduler.receive(event, peer, now)
        self.peers.tick(now)
        return moved

    def order(self, orders: Iterable[MoverOrder]) -> None:
        """See `ties.Ties`."""
        for order in orders:
            match order:
                case ExpectRoom(room, peer, pages):
                    self._to_mover.send(Expect(room, peer, pages))
                case CancelRoom(room):
                    self._to_mover.send(Cancel(room))
                    self._ended.append(room)

    def take_ended(self) -> tuple[int, ...]:
        """See `ties.Ties`."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def tell(self, messages: Iterable[tuple[str, PeerMessage]], now: float) -> None:
        """See `ties.Ties`."""
        for peer, message in messages:
            if peer in self._held:
                self._held[peer].append(message)
            else:
                self.peers.send(peer, message, now)

    def _hear(self, peer: str, news: News, now: float) -> None:
        match news:
            case PeerUp(_, offers, key):
                logger.info("paired with %s", peer)
                self._early.setdefault(peer, [])
                self._met.add(peer)
                self._to_mover.send(Meet(peer, key, offers if self._half.writes else None))
            case PeerGone(reason):
                logger.warning("%s: %s", peer, reason)
                self._dismiss(peer)
                if self._half.writes:
                    self._scheduler.receive(PeerLost(peer, reason), "", now)
            case PeerUnreachable(reason):
                logger.warning("%s", reason)
                self._scheduler.receive(PeerSilent(peer, reason), "", now)
            case PeerRefused(reason):
                logger.error("%s", reason)

    def _dismiss(self, peer: str) -> None:
        """The mover takes its access away; until then nothing is said to whoever has its name."""
        self._early.pop(peer, None)
        self._held.setdefault(peer, [])
        self._to_mover.send(Dismiss(peer))
