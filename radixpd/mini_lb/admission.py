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

from radixpd.mini_lb.snapshot import Candidate, DecodeModel

__all__ = ["Decoding", "Slo", "broken"]

HEADROOM = 0.9


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request may take, in seconds; 0 for no limit."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


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


def broken(chosen: Candidate, decoding: Decoding, slo: Slo, now: float, *, predict: bool = True) -> str | None:
    """Which of the limits the request would break, in words; None if it would keep both. `predict` off: by the decode load of now.

    An idle worker is never refused to anybody: rejection is about load, and estimates that nobody tests any more would stay wrong.
    """
    if slo.ttft_s and chosen.queue_s and chosen.ttft_s > HEADROOM * slo.ttft_s:
        return f"the first token would take {chosen.ttft_s:.2f} s, the limit is {slo.ttft_s:.2f} s"
    if not slo.tpot_s or not decoding.starts:
        return None
    # Then or now, whichever is more: what leaves until then will be followed by others.
    tpot_s = max(decoding.tpot_s(at, now) for at in ((now, now + chosen.ttft_s) if predict else (now,)))
    if tpot_s > HEADROOM * slo.tpot_s:
        return f"a token would take {1000 * tpot_s:.1f} ms, the limit is {1000 * slo.tpot_s:.1f} ms"
    return None
