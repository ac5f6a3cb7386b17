"""Early rejection: whether a request that comes now would miss its deadlines, so that no prefill is wasted on it.

The decode load that counts is the one at the time when its prefill will have ended, not the one now: judging by the present one makes the
two loads swing against each other, since what was admitted while decode was idle arrives there all at once. Predicted as in Mooncake:
every request decodes for the same time; those whose prefill ends by then are added, those that will be through are dropped. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixpd.mini_lb.snapshot import Candidate, DecodeModel

__all__ = ["Decoding", "Slo", "broken"]


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request may take, in seconds; 0 for no limit."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Decoding:
    """The requests of one worker that generates: when each began or is expected to begin. `lasts_s`: how long one decodes."""

    model: DecodeModel
    starts: Sequence[float]
    lasts_s: float
    tokens: int = 0

    def rows(self, at: float) -> int:
        """How many will be generating at that time."""
        return sum(start <= at < start + self.lasts_s for start in self.starts)

    def tpot_s(self, at: float) -> float:
        """Time per output token then, one request more counted in."""
        return self.model.step(self.rows(at) + 1, self.tokens)


def broken(chosen: Candidate, decoding: Decoding, slo: Slo, now: float) -> str | None:
    """Which of the limits the request would break, in words; None if it would keep both."""
    if slo.ttft_s and chosen.ttft_s > slo.ttft_s:
        return f"the first token would take {chosen.ttft_s:.2f} s, the limit is {slo.ttft_s:.2f} s"
    tpot_s = decoding.tpot_s(now + chosen.ttft_s)
    if slo.tpot_s and tpot_s > slo.tpot_s:
        return f"a token would take {1000 * tpot_s:.1f} ms, the limit is {1000 * slo.tpot_s:.1f} ms"
    return None
