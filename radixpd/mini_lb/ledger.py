"""What was sent to one worker and is not finished: its queue as only the sender can know it at once.

Workers report their load late; whoever trusts reports alone sends everybody to the worker that was idle a moment ago. A `Line` counts
every request from the moment it is sent until its account is closed, exactly once. Reports are used for what they alone can tell: load
that others have put there. It also learns the worker's speed from the times of first tokens. Time is an argument. Called by `dispatch`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import add, sub

from radixpd.mini_lb.fit import DecodeFit, PrefillFit, Work

__all__ = ["Entry", "Line"]

NOTHING = Work()
TYPICAL_PROMPT = 500  # tokens: of others, where we have nothing there to compare with
RECENT_S = 60.0  # work counts for about this long as recent


@dataclass(slots=True, eq=False)
class Entry:
    """One request at one worker. `new`, `cached`: of its prompt tokens, as estimated when it was sent; `output`: expected tokens."""

    sent: float
    new: int
    cached: int
    output: int
    due: float = 0.0  # when its first token was expected
    ahead: Work = NOTHING  # prompts that were waiting when it came
    begun: float = 0.0  # seconds of that which were done by then
    first: float | None = None  # when its first token came
    rows_before: float = 0.0  # the line's `_rows` at that time

    @property
    def work(self) -> Work:
        """Its prompt."""
        return Work.of(self.new, self.cached)


class Line:
    """One worker's queue and speed."""

    def __init__(self) -> None:
        self.entries: dict[Entry, None] = {}  # in order of dispatch
        self._queue: dict[Entry, None] = {}  # of them, those whose first token is still to come
        self.prefill = PrefillFit()
        self.decode = DecodeFit()
        self.tokens = 0  # of KV memory that the entries will use
        self._waiting = Work()  # the sum over `_queue`
        self._progress = 0.0  # when a first token last came
        self.generating = 0  # requests past their first token
        self._rows = 0.0  # integral of that over time
        self._rows_at = 0.0
        self._recent = 0.0
        self._recent_at = 0.0
        self._reported = (0, 0)  # others' requests in flight, and of them waiting
        self._foreign = (0, 0)  # the same, but never more than the last two reports agree on

    @property
    def in_flight(self) -> int:
        """Requests there, own and others'."""
        return len(self.entries) + self._foreign[0]

    @property
    def queued_tokens(self) -> int:
        """Uncached prompt tokens that wait."""
        return self._waiting.tokens

    def open(self, entry: Entry, *, prompt: bool) -> None:
        """A request was sent; `prompt`: this worker computes its prompt."""
        self.entries[entry] = None
        self.tokens += entry.new + entry.cached + entry.output
        if prompt:
            entry.ahead, entry.begun = self._waiting, self._begun(entry.sent)
            self._queue[entry] = None
            self._waiting = Work(*map(add, self._waiting, entry.work))

    def first_token(self, entry: Entry, now: float, cached: int | None) -> None:
        """Its prompt is computed."""
        if entry.first is not None or entry not in self.entries:
            return
        self._count(now, 1)
        entry.first, entry.rows_before = now, self._rows
        if not self._leave_queue(entry):
            return
        whole = entry.new + entry.cached
        known = entry.cached if cached is None else max(0, min(cached, whole))
        self.prefill.observe(Work.of(whole - known, known), entry.ahead, entry.begun, max(now - entry.sent, 0.0))
        self._progress = max(self._progress, now)

    def close(self, entry: Entry, now: float, output: int) -> None:
        """It has ended, well or not. `output`: tokens it wrote, 0 for unknown."""
        if entry not in self.entries:
            return
        self._leave_queue(entry)
        if entry.first is not None:
            self._count(now, -1)
            if output > 1 and (lasted := now - entry.first) > 0:
                self.decode.observe((self._rows - entry.rows_before) / lasted, self.tokens, lasted / (output - 1))
        del self.entries[entry]
        self.tokens -= entry.new + entry.cached + entry.output

    def worked(self, seconds: float, now: float) -> None:
        """So much work was sent there."""
        self._recent = self.recent(now) + seconds
        self._recent_at = now

    def recent(self, now: float) -> float:
        """Work sent of late."""
        return self._recent * math.exp(min(0.0, self._recent_at - now) / RECENT_S)

    def reported(self, in_flight: int, waiting: int) -> None:
        """The worker's own count, of everybody's requests; a report is a little old, so a surplus counts when the next one confirms it."""
        report = max(0, in_flight - len(self.entries)), max(0, waiting - len(self._queue))
        self._foreign = min(report[0], self._reported[0]), min(report[1], self._reported[1])
        self._reported = report

    def queued_s(self, now: float) -> float:
        """Seconds that a prompt sent now would wait for those before it."""
        if not self._queue:
            return self.prefill.queueing * self._foreign[1] * self.prefill.model.seconds(TYPICAL_PROMPT)
        seconds = self.prefill.seconds(self._waiting) * (1 + self._foreign[1] / len(self._queue))  # others' prompts are like ours
        head = self.prefill.seconds(next(iter(self._queue)).work)
        return self.prefill.queueing * max(0.0, seconds - min(self._begun(now), head))

    def oldest_sent(self, now: float) -> float:
        """When the oldest open request was sent; `now` if there is none."""
        return next(iter(self.entries)).sent if self.entries else now

    def _count(self, now: float, change: int) -> None:
        self._rows += self.generating * max(0.0, now - self._rows_at)
        self._rows_at = max(now, self._rows_at)
        self.generating += change

    def _begun(self, now: float) -> float:
        """For how long the first waiting prompt has been at work."""
        return max(0.0, now - max(next(iter(self._queue)).sent, self._progress)) if self._queue else 0.0

    def _leave_queue(self, entry: Entry) -> bool:
        if entry not in self._queue:
            return False
        del self._queue[entry]
        self._waiting = Work(*map(sub, self._waiting, entry.work))
        return True
