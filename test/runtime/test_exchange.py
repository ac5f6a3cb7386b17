"""What the brain hears of its peers and its mover, and in which order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixpd.core.handoff import NotNeeded, PeerLost, Reserve, TicketDone
from radixpd.runtime.exchange import Exchange, Half
from radixpd.runtime.mover_messages import Dismiss, Dismissed, Meet, Met, to_report
from radixpd.runtime.peers import PeerGone, PeerUp

UP = PeerUp(b"i" * 16, {"tcp": {}}, b"k" * 32)


class Queue:
    """Both ends of a link."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def drain(self, now: float = 0.0) -> list[Any]:
        found, self.messages = self.messages, []
        return found


class Peers(Queue):
    """The control link: `messages` are events that come in, `sent` goes out."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Any] = []
        self.doubted: list[str] = []

    def doubt(self, peer: str) -> None:
        self.doubted.append(peer)

    def tick(self, now: float) -> None:
        pass

    def send(self, peer: str, message: Any, now: float) -> None:  # type: ignore[override]
        self.sent.append((peer, message))


class Brain:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def receive(self, message: Any, peer: str, now: float) -> None:
        self.heard.append((peer, message))


class World:
    """An exchange between three fakes."""

    def __init__(self, *, writes: bool) -> None:
        self.brain, self.peers, self.orders, self.reports = Brain(), Peers(), Queue(), Queue()
        half = Half(lambda: self.peers, lambda ready: None, writes)  # type: ignore[arg-type, return-value]
        self.exchange = Exchange(
            "",
            lambda mode: half,
            self.brain,  # type: ignore[arg-type]
            to_mover=self.orders,  # type: ignore[arg-type]
            from_mover=self.reports,  # type: ignore[arg-type]
        )

    def take(self, *events: tuple[str, Any], reports: tuple[Any, ...] = ()) -> list[Any]:
        """What the brain hears of these."""
        self.peers.messages += events
        self.reports.messages += reports
        self.exchange.take(0.0)
        heard, self.brain.heard = self.brain.heard, []
        return heard


@pytest.mark.parametrize("writes", [True, False])
def test_a_peer_is_heard_once_the_mover_knows_the_way_to_it(writes: bool) -> None:
    world = World(writes=writes)
    reserve = Reserve(1, 20, 0, np.arange(2, dtype=np.int32), 10.0, b"d" * 32, 0)
    assert world.take(("d", UP), ("d", reserve), ("other", NotNeeded(2))) == [("other", NotNeeded(2))]
    assert world.orders.drain() == [Meet("d", b"k" * 32, {"tcp": {}} if writes else None)]
    assert world.take(("d", NotNeeded(3)), reports=(to_report(TicketDone(9)),)) == [("", TicketDone(9))]
    assert world.take(reports=(Met("d"),)) == [("d", reserve), ("d", NotNeeded(3))]
    assert world.take(("d", NotNeeded(4))) == [("d", NotNeeded(4))]


def test_the_order_of_messages_is_kept_when_met_and_news_come_together() -> None:
    world = World(writes=True)
    world.take(("d", UP), ("d", NotNeeded(1)))
    assert world.take(("d", NotNeeded(2)), reports=(Met("d"),)) == [("d", NotNeeded(1)), ("d", NotNeeded(2))]


def test_nothing_is_said_to_a_new_process_before_the_old_one_has_lost_its_access() -> None:
    world = World(writes=False)
    world.take(("p", UP), reports=(Met("p"),))
    world.take(("p", PeerGone("restarted")), ("p", NotNeeded(7)))
    assert world.orders.drain()[-1] == Dismiss("p")
    world.exchange.tell([("p", NotNeeded(1)), ("q", NotNeeded(2))], 0.0)
    assert world.peers.sent == [("q", NotNeeded(2))]
    assert ("", PeerLost("p", "its pool")) in world.take(reports=(to_report(PeerLost("p", "its pool")), Dismissed("p")))
    assert world.peers.sent[1:] == [("p", NotNeeded(1))]


def test_prefill_loses_a_restarted_decode_server_at_once() -> None:
    world = World(writes=True)
    assert world.take(("d", UP), ("d", NotNeeded(1)), ("d", PeerGone("restarted"))) == [("", PeerLost("d", "restarted"))]
    assert world.take(reports=(Met("d"), Dismissed("d"))) == [], "what the old process had said is of no use"


def test_a_peer_whose_process_the_mover_has_seen_end_is_not_asked_again_before_it_is_heard() -> None:
    world = World(writes=False)
    world.take(("p", UP), reports=(Met("p"),))
    world.take(reports=(to_report(PeerLost("p", "killed")),))
    assert world.peers.doubted == ["p"]
