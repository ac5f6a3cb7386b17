"""The mover of a runner process, tied to the scheduler: orders come in on a thread of their own, reports go out from the mover's.

Neither waits for a step: a peer that may write, or must not any more, is a matter of the moment. Invariant: orders are carried out in the
order in which they were given. Made by the runner process of a server that has peers.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict, replace
from typing import Any

import msgspec
import zmq

from radixpd.config.resolve import Resolved
from radixpd.core.handoff import MoverReport
from radixpd.kv.codec_choice import carriers
from radixpd.kv.mover import Mover, MoverOptions
from radixpd.kv.pool import Pool
from radixpd.kv.transport import Endpoint, TransportOptions
from radixpd.runtime.disaggregation import reachable_host
from radixpd.runtime.links import Addresses, Receiver, Sender
from radixpd.runtime.mover_messages import Cancel, Dismiss, Dismissed, Expect, Meet, Met, ToMover, to_report

__all__ = ["MoverLink", "mover_options"]

LOOK_MS = 200  # between two looks at whether this is the end

logger = logging.getLogger(__name__)


def mover_options(resolved: Resolved, folder: str) -> MoverOptions:
    """What the flags say. `folder`: a private one."""
    settings, server = resolved.settings.disaggregation, resolved.settings.server
    codec = settings.disaggregation_transfer_dtype
    return MoverOptions(
        backends=carriers(settings.disaggregation_transfer_backend, codec),
        link_gbps=settings.disaggregation_link_gbps,
        transport=TransportOptions(
            host=server.host, advertise=reachable_host(resolved), folder=folder, ib_device=settings.disaggregation_ib_device or ""
        ),
        codec=codec,
    )


class MoverLink:
    """Raises ConfigError when a transport cannot start."""

    def __init__(self, context: zmq.Context[Any], addresses: Addresses, rank: int, pool: Pool, options: MoverOptions) -> None:
        self._reports = Sender(context, addresses.from_mover)  # used on the mover's thread alone
        self._orders: Receiver[ToMover] = Receiver(context, addresses.to_mover(rank), ToMover, bind=True)
        self._stop = False
        self.mover = Mover(pool, self._report, options)
        self._thread = threading.Thread(target=self._listen, name="mover-link", daemon=True)
        self._thread.start()

    @property
    def endpoints(self) -> dict[str, dict[str, Any]]:
        """What peers are told, by transport."""
        return {each.transport: asdict(each) for each in self.mover.endpoints}

    def close(self) -> None:
        """Stop; open transfers fail."""
        self._stop = True
        self._thread.join()
        self.mover.close()
        self._orders.close()
        self._reports.close()

    def _report(self, report: MoverReport) -> None:
        self._reports.send(to_report(report))

    def _listen(self) -> None:
        while not self._stop:
            if self._orders.socket.poll(LOOK_MS):
                for order in self._orders.drain():
                    self._obey(order)

    def _obey(self, order: ToMover) -> None:
        match order:
            case Expect() | Cancel():
                self.mover.order(order.order())
            case Meet(peer, token, offers):
                if offers is None:
                    self.mover.admit(peer, token)
                else:
                    self.mover.connect(peer, _endpoints(peer, offers), token)
                self.mover.after(lambda: self._reports.send(Met(peer)))
            case Dismiss(peer):
                self.mover.disconnect(peer)
                self.mover.after(lambda: self._reports.send(Dismissed(peer)))


def _endpoints(peer: str, offers: dict[str, dict[str, Any]]) -> tuple[Endpoint, ...]:
    """Those that make sense; a peer of another version may offer what this one does not know."""
    found = []
    for name, offer in offers.items():
        try:
            found.append(replace(msgspec.convert(offer, Endpoint), transport=name))
        except msgspec.ValidationError as error:
            logger.warning("%s offers an endpoint that makes no sense: %s: %s", peer, name, error)
    return tuple(found)
