"""`--max-queued-requests`: who is turned away when too many wait.

A request may come in on the credit of a free slot, which does not say that there are pages for it: that shows when the whole queue was
looked at. Invariant: who was let stay then is not turned away later. Called by the scheduler when a request is enqueued and when a step is
planned.
"""

from __future__ import annotations

from radixpd.core.prefill import Prefill
from radixpd.core.request import Finish, Request
from radixpd.core.roster import Roster

__all__ = ["QueueBound"]


class QueueBound:
    """`most`: None is no bound."""

    def __init__(self, most: int | None, prefill: Prefill, roster: Roster) -> None:
        self._most = most
        self._prefill = prefill
        self._roster = roster
        self._settled = 0  # place of the newest request that will not be turned away any more

    def entered(self, request: Request) -> None:
        """One more waits."""
        if self._most is not None and self._prefill.surplus(self._most) > 0:
            self._turn_away(request)

    def planned(self) -> None:
        """After a look at the whole queue: turn away the newest of those who came on the credit of a free slot and found no pages."""
        settled = self._prefill.settled
        if self._most is None or settled == self._settled:
            return
        surplus = self._prefill.surplus(self._most)
        for request in reversed(self._prefill.waiting.copy()):
            if surplus <= 0 or request.order <= self._settled:
                break
            if not request.sample:  # a sibling whose leader has a seat stays
                surplus -= len(request.samples)
                self._turn_away(request)
        self._settled = settled

    def _turn_away(self, request: Request) -> None:
        message = f"the queue is full: --max-queued-requests is {self._most}"
        self._roster.finish(request, Finish("abort", message=message, status=503), 0)
