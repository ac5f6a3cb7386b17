"""What a scheduler and its runner's mover say to each other: orders one way, reports the other, on links of their own.

They do not wait behind steps: a page that a peer writes, or must write no more, is a matter of the moment. Orders and reports of
`core.handoff` travel as the dataclasses they are, by name; who the peers are (`Meet`, `Dismiss`) only this process boundary knows.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from radixpd.core.handoff import CancelRoom, ExpectRoom, Failure, Landed, MoverReport, PeerLost, Quiet, TicketDone

__all__ = ["Cancel", "Expect", "FromMover", "Meet", "Met", "Dismiss", "Dismissed", "Report", "ToMover", "report_of", "to_report"]

REPORTS: dict[str, type[Any]] = {kind.__name__: kind for kind in (TicketDone, Quiet, Landed, Failure, PeerLost)}


class Expect(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`ExpectRoom`."""

    room: int
    peer: str
    pages: np.ndarray  # int32

    def order(self) -> ExpectRoom:
        """As the mover knows it."""
        return ExpectRoom(self.room, self.peer, self.pages)


class Cancel(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`CancelRoom`."""

    room: int

    def order(self) -> CancelRoom:
        """As the mover knows it."""
        return CancelRoom(self.room)


class Meet(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A peer has been paired with. With `offers` (its endpoints, by transport) this server writes there, without it writes here.
    `token`: known to both processes alone. Answered by `Met`."""

    peer: str
    token: bytes
    offers: dict[str, dict[str, Any]] | None = None


class Met(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`Meet` is done: a plan may name this peer."""

    peer: str


class Dismiss(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A peer's process has been replaced: it has no access any more. Answered by `Dismissed`."""

    peer: str


class Dismissed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`Dismiss` is done; whatever it has proven was reported before."""

    peer: str


class Report(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One `MoverReport`: the name of its class, its fields."""

    kind: str
    values: tuple[int | str | bool, ...]


ToMover = Expect | Cancel | Meet | Dismiss
FromMover = Report | Met | Dismissed


def to_report(report: MoverReport) -> Report:
    """For the wire."""
    return Report(type(report).__name__, tuple(getattr(report, each.name) for each in fields(report)))


def report_of(message: Report) -> MoverReport:
    """From the wire."""
    report: MoverReport = REPORTS[message.kind](*message.values)
    return report
