"""What was sent to one worker and is not finished: its queue as only the sender can know it at once.

Workers report their load late; whoever trusts reports alone sends everybody to the worker that was idle a moment ago. A `Line` counts
every request from the moment it is sent until its account is closed, exactly once. Reports are used for what they alone can tell: load
that others have put there. It also learns the worker's speed from the times of first tokens. Time is an argument. Called by `dispatch`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import add, sub

from radixpd.mini_lb.fit import Work
from radixpd.mini_lb.speed import Fits, Speed

__all__ = ["Entry", "Line"]

NOTHING = Work()
TYPICAL_PROMPT = 500  # tokens: of others, where we have nothing there to compare with
RECENT_S = 60.0  # work counts for about this long as recent
LESSONS = 400  # requests that the speed is learned from one by one
LESSON_S = 0.01  # between two of the later ones: what a busy worker teaches every time it has mostly taught before


@dataclass(slots=True, eq=False)
class Entry:
    """One request at one worker. `new`, `cached`: of its prompt tokens, as estimated when it was sent; `output`: expected tokens.

    `stream`: its first token will be seen. Of a plain answer it is taken to come when it was due.
    """

    sent: float
    new: int
    cached: int
    output: int
    stream: bool = True
    prompt: bool = True  # the worker computes it
    due: float = 0.0  # when its first token was expected
    ahead: Work = NOTHING  # prompts that were waiting when it came
    begun: float = 0.0  # seconds of that which were done by then
    first: float | None = None  # when its first token came, or was due
    told: int | None = None  # cached tokens as the worker says, once the first token or the answer is there
    rows_before: float = 0.0  # the line's `_rows` at the first token

    @property
    def work(self) -> Work:
        """Its prompt."""
        return Work.of(self.new, self.cached)


class Line:
    """One worker's queue and speed."""

    def __init__(self, common: Fits) -> None:
        self.speed = Speed(common)
        self.entries: dict[Entry, None] = {}  # in order of dispatch
        self._queue: dict[Entry, None] = {}  # of them, those whose first token is still to come
        self.tokens = 0  # of KV memory that the entries will use
        self._waiting = Work()  # the sum over `_queue`
        self._progress = 0.0  # when a first token last came
        self.generating = 0  # requests past their first token
        self._rows = 0.0  # integral of that over time
        self._rows_at = 0.0
        self._recent: tuple[float, ...] = (
            0.0,
            0.0,
            0.0,
            0.0,
        )  # what was sent of late: prompts, tokens, squares as in `Work`; output tokens
        self._recent_at = 0.0
        self._reported = (0, 0)  # others' requests in flight, and of them waiting
        self._foreign = (0, 0)  # the same, but never more than the last two reports agree on
        self._lessons = 0
        self._taught = 0.0  # when the last of them was

    @property
    def in_flight(self) -> int:
        """Requests there, own and others'."""
        return len(self.entries) + self._foreign[0]

    def open(self, entry: Entry) -> None:
        """A request was sent."""
        self._presume(entry.sent)
        fade = math.exp(min(0.0, self._recent_at - entry.sent) / RECENT_S)
        more = (*(entry.work if entry.prompt else NOTHING), entry.output)
        self._recent = tuple(fade * old + new for old, new in zip(self._recent, more))
        self._recent_at = entry.sent
        self.entries[entry] = None
        self.tokens += entry.new + entry.cached + entry.output
        if entry.prompt:
            entry.ahead, entry.begun = self._waiting, self._begun(entry.sent)
            self._queue[entry] = None
            self._waiting = Work(*map(add, self._waiting, entry.work))

    def first_token(self, entry: Entry, now: float, cached: int | None) -> None:
        """Its prompt is computed; of a plain answer, this says no more than `cached`."""
        if entry.told is not None or entry not in self.entries:
            return
        whole = entry.new + entry.cached
        entry.told = entry.cached if cached is None else max(0, min(cached, whole))
        if entry.stream and self._begins(entry, now) and self._teaches(now):
            own = Work.of(whole - entry.told, entry.told)
            self.speed.prompt(own, entry.ahead, begun=entry.begun, seconds=max(now - entry.sent, 0.0))

    def close(self, entry: Entry, now: float, output: int) -> None:
        """It has ended, well or not. `output`: tokens it wrote, 0 for unknown."""
        if entry not in self.entries:
            return
        if entry.told is not None and output > 1:
            self._learn(entry, now, output)
        if entry.first is None:
            self._leave_queue(entry)
        else:
            self._count(now, -1)
        del self.entries[entry]
        self.tokens -= entry.new + entry.cached + entry.output

    def recent(self, now: float) -> float:
        """Seconds of work that were sent there of late, as long as it takes by what is known now."""
        model = self.speed.prefill.model
        prompts, tokens, squares, output = self._recent
        seconds = model.a * prompts + model.b * tokens + model.c * squares + output * self.step_s()
        return seconds * math.exp(min(0.0, self._recent_at - now) / RECENT_S)

    def step_s(self) -> float:
        """Time per output token there now, one request more counted in."""
        return self.speed.decode.step(self.generating + 1, self.tokens)

    def reported(self, in_flight: int, waiting: int) -> None:
        """The worker's own count, of everybody's requests; a report is a little old, so a surplus counts when the next one confirms it."""
        report = max(0, in_flight - len(self.entries)), max(0, waiting - len(self._queue))
        self._foreign = min(report[0], self._reported[0]), min(report[1], self._reported[1])
        self._reported = report

    def queued(self, now: float) -> tuple[int, float]:
        """What a prompt sent now would find before it: uncached tokens still to be computed, and seconds to wait for them."""
        speed = self.speed.prefill
        if not self._queue:
            return 0, speed.queueing * self._foreign[1] * speed.model.seconds(TYPICAL_PROMPT) if self._foreign[1] else 0.0
        self._presume(now)
        head = next(iter(self._queue), None)
        if head is None:
            return self.queued(now)
        head_s = speed.seconds(head.work)
        begun_s = min(now - max(head.sent, self._progress), head_s)
        tokens = self._waiting.tokens - (int(head.new * begun_s / head_s) if head_s > 0 else 0)
        # Others' prompts are taken to be like ours.
        seconds = speed.seconds(self._waiting) * (1 + self._foreign[1] / len(self._queue)) - begun_s
        return tokens, speed.queueing * max(0.0, seconds)

    def oldest_sent(self, now: float) -> float:
        """When the oldest open request was sent; `now` if there is none."""
        return next(iter(self.entries)).sent if self.entries else now

    def _learn(self, entry: Entry, now: float, output: int) -> None:
        """What the end of an answer tells of the worker's speed."""
        rows = self._rows + self.generating * max(0.0, now - self._rows_at)
        lasted = now - (entry.first if entry.first is not None else now)
        if entry.stream and lasted > 0:
            self.speed.step((rows - entry.rows_before) / lasted, self.tokens, lasted / (output - 1))
        elif not entry.stream and entry.prompt and entry.told is not None and self._teaches(now):
            own = Work.of(entry.new + entry.cached - entry.told, entry.told)
            self.speed.prompt(own, entry.ahead, begun=entry.begun, seconds=max(now - entry.sent, 0.0), output=output)
            self.speed.presumed_step(len(self.entries), self.tokens)

    def _teaches(self, now: float) -> bool:
        """Whether a prompt that ends now is to be learned from."""
        if self._lessons >= LESSONS and now < self._taught + LESSON_S:
            return False
        self._lessons += 1
        self._taught = now
        return True

    def _presume(self, now: float) -> None:
        """Plain answers at the head of the queue whose first token was due have it."""
        while self._queue and not (head := next(iter(self._queue))).stream and head.due <= now:
            self._begins(head, head.due)

    def _begins(self, entry: Entry, now: float) -> bool:
        """Its first token is there; whether its prompt was computed here."""
        self._count(now, 1)
        entry.first, entry.rows_before = now, self._rows
        self._progress = max(self._progress, now)
        return self._leave_queue(entry)

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
