"""What ties the scheduler's loop to other servers: nothing (`Alone`), or an `Exchange` with its control link and its mover.

The loop does the same with either. `open_ties` is called once, by the scheduler process's main.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import zmq

from radixpd.config.resolve import Resolved
from radixpd.core.handoff import MoverOrder, PeerMessage
from radixpd.core.scheduler import Scheduler
from radixpd.errors import ConfigError
from radixpd.runtime.disaggregation import bind_of, has_peers, identity_of, mode_of, writes_of
from radixpd.runtime.exchange import Exchange, Half
from radixpd.runtime.links import Addresses, Receiver, Sender
from radixpd.runtime.messages import RunnerReady
from radixpd.runtime.mover_messages import FromMover
from radixpd.runtime.peers import Peers

__all__ = ["Alone", "Ties", "open_ties"]


class Ties(Protocol):
    """What the scheduler's loop needs of its ties to other servers."""

    @property
    def has_news(self) -> bool:
        """Whether `take` has something although no socket is readable."""
        ...

    def identify(self, ready: RunnerReady) -> None:
        """The runner is ready: from now on this server pairs."""
        ...

    def switch(self, mode: str) -> None:
        """Be the other half of pairs. Raises ConfigError, and changes nothing, if that is not possible."""
        ...

    def take(self, now: float) -> bool:
        """What has come goes to the brain; whether that was anything."""
        ...

    def order(self, orders: Iterable[MoverOrder]) -> None:
        """Orders for the own mover."""
        ...

    def take_ended(self) -> tuple[int, ...]:
        """Rooms that such orders have ended since the last call. The next plan carries them: it may reach the runner before they do."""
        ...

    def tell(self, messages: Iterable[tuple[str, PeerMessage]], now: float) -> None:
        """Say something to other servers' brains."""
        ...


class Alone:
    """Of a server that serves requests from prompt to last token."""

    has_news = False

    def identify(self, ready: RunnerReady) -> None:
        """Nobody asks."""

    def switch(self, mode: str) -> None:
        """There is no other half."""
        raise ConfigError("this server is no half of a pair: start it with --disaggregation-mode prefill or decode")

    def take(self, now: float) -> bool:
        """Nobody says anything."""
        return False

    def order(self, orders: Iterable[MoverOrder]) -> None:
        """There are none."""

    def take_ended(self) -> tuple[int, ...]:
        """There are none."""
        return ()

    def tell(self, messages: Iterable[tuple[str, PeerMessage]], now: float) -> None:
        """There are none."""


def open_ties(
    scheduler: Scheduler,
    resolved: Resolved,
    addresses: Addresses,
    poller: zmq.Poller,
    *,
    context: zmq.Context[Any],
    peers_context: zmq.Context[Any],
) -> Ties:
    """Those of a server with these settings. Raises ConfigError when its control port is taken."""
    if not has_peers(resolved):
        return Alone()
    from_mover: Receiver[FromMover] = Receiver(context, addresses.from_mover, FromMover, bind=True)
    poller.register(from_mover.socket, zmq.POLLIN)

    def half(mode: str) -> Half:
        """As this mode. Every opening is a new incarnation."""

        def peers() -> Peers:
            bind, allowed = bind_of(mode, resolved), resolved.settings.disaggregation.disaggregation_peers
            return Peers(peers_context, poller, secret=resolved.peer_secret, incarnation=os.urandom(16), bind=bind, allowed=allowed)

        return Half(peers, partial(identity_of, mode, resolved), writes_of(mode))

    return Exchange(mode_of(resolved), half, scheduler, to_mover=Sender(context, addresses.to_mover(0)), from_mover=from_mover)
