"""How the last requests went, for whoever asks afterwards: one end for each of their samples.

A request is known by the name that it had inside the server, so names of two tenants never meet. Invariants: at most `KEPT` requests, the
oldest go first; a name means its latest request. Fed by the client when the brain has let a request go; read by `GET /journey/{rid}`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from radixpd.core.journey import Journey
from radixpd.core.request import Finish
from radixpd.runtime.output import Output

__all__ = ["KEPT", "Ended", "Journeys"]

KEPT = 1000  # requests


@dataclass(frozen=True, slots=True)
class Ended:
    """One sample, after its end."""

    rid: str
    sample: int
    finish: Finish
    completion: int  # tokens that its client got
    journey: Journey

    @staticmethod
    def of(output: Output) -> Ended | None:
        """None while it has not ended. One that the detokenizer has ended may still live in the brain for a moment."""
        if output.finish is None or output.journey is None:
            return None
        return Ended(output.rid, output.sample, output.finish, len(output.ids), output.journey)


class Journeys:
    """By the client's rid, and below it by sample."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[str, dict[str, Ended]] = OrderedDict()

    def begin(self, group: str) -> None:
        """The name is a new request's."""
        self._kept.pop(group, None)

    def add(self, group: str, ended: Ended) -> None:
        """One more sample of the request has ended."""
        if group not in self._kept:
            self._kept[group] = {}
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        self._kept[group][ended.rid] = ended

    def of(self, rid: str) -> list[Ended]:
        """All ended samples of a request, or the one that is called so; empty if nothing is known."""
        if (found := self._kept.get(rid)) is not None:
            return sorted(found.values(), key=lambda each: each.sample)
        one = self._kept.get(rid.rpartition("-")[0], {}).get(rid)
        return [] if one is None else [one]
