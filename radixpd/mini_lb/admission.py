"""Early rejection: whether a request that comes now would miss its deadlines, so that no prefill is wasted on it.

The decode load that counts is the one at the time when its prefill will have ended, not the one now: judging by the present one makes the
two loads swing against each other, since what was admitted while decode was idle arrives there all at once. Predicted as in Mooncake, from
one mean time of decoding: requests whose prefill ends by then are added, those that will be through are dropped, each by its chance, since
one that has outlived the mean is still there. Limits are aimed at with some headroom: half of what is admitted at a limit breaks it. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from radixpd.mini_lb.snapshot import Candidate, DecodeModel

__all__ = ["Decoding", "Miss", "Slo", "broken"]

HEADROOM = 0.9
LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request may take, in seconds; 0 for no limit."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


class Miss(NamedTuple):
    """A limit that a request would break, and what it is expected to take."""

    limit: Literal["ttft", "tpot"]
    predicted_s: float
    limit_s: float

    def __str__(self) -> str:
        if self.limit == "ttft":
            return f"the first token would take {self.predicted_s:.3f} s, more than {HEADROOM:g} of the limit of {self.limit_s:.3f} s"
        took, most = 1000 * self.predicted_s, 1000 * self.limit_s
        return f"a token would take {took:.2f} ms, more than {HEADROOM:g} of the limit of {most:.2f} ms"

    @property
    def retry_after(self) -> int:
        """Whole seconds after which it may be worth another try: when as much of the queue is through as there is too much of it."""
        return math.ceil(min(max(self.predicted_s - HEADROOM * self.limit_s, 1.0), LONGEST_WAIT_S))


@dataclass(frozen=True, slots=True)
class Decoding:
    """The requests of one worker that generates: when each began (now or before) or is expected to. `lasts_s`: how long one decodes."""

    model: DecodeModel
    starts: Sequence[float]
    lasts_s: float
    tokens: int = 0

    def rows(self, at: float, now: float) -> float:
        """How many will be generating at that time."""
        return sum(math.exp((max(start, now) - at) / self.lasts_s) for start in self.starts if start <= at)

    def tpot_s(self, at: float, now: float) -> float:
        """Time per output token then, one request more counted in."""
        return self.model.step(self.rows(at, now) + 1, self.tokens)


def broken(chosen: Candidate, decoding: Decoding, slo: Slo, now: float, *, waited_s: float = 0.0, predict: bool = True) -> Miss | None:
    """Which of the limits the request would break; None if it would keep both. `waited_s`: for how long it has waited at the door already.
    `predict` off: by the decode load of now.

    An idle worker is never refused to anybody: rejection is about load, and estimates that nobody tests any more would stay wrong.
    """
    ttft_s = waited_s + chosen.ttft_s
    if slo.ttft_s and (chosen.queue_s or waited_s) and ttft_s > HEADROOM * slo.ttft_s:
        return Miss("ttft", ttft_s, slo.ttft_s)
    if not slo.tpot_s or not decoding.starts:
        return None
    # Then or now, whichever is more: what leaves until then will be followed by others.
    tpot_s = max(decoding.tpot_s(at, now) for at in ((now, now + chosen.ttft_s) if predict else (now,)))
    return Miss("tpot", tpot_s, slo.tpot_s) if tpot_s > HEADROOM * slo.tpot_s else None
