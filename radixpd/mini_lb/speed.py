"""How fast one worker is: as fast as the fleet, until its own times have shown something else.

Every observation goes to two fits, the worker's own and one for all workers. Times are noisy, and workers are compared with each other:
differences between fits that each saw little would send requests from one worker to the other for nothing. So a worker's own fit counts
only while it has predicted that worker's times clearly better than the common one. Time is an argument. Called by `ledger`.
"""

from __future__ import annotations

from radixpd.mini_lb.fit import DecodeFit, PrefillFit, Work
from radixpd.mini_lb.snapshot import DecodeModel

__all__ = ["Fits", "Speed"]

REMEMBERED = 400  # observations
TRUSTED = 20  # observations of a worker before its own fit can win
MEMORY = 0.02  # share of the newest error in the mean ones
CLEARLY = 0.6  # of the common fit's mean error


class Fits:
    """What is known of a worker, or of all. Both remember as much: else the one that forgets sooner would seem better in a bad minute."""

    def __init__(self) -> None:
        self.prefill = PrefillFit(memory=REMEMBERED)
        self.decode = DecodeFit(memory=REMEMBERED)


class _Contest:
    """Mean relative errors of two predictions of the same times."""

    def __init__(self) -> None:
        self._own = 0.0
        self._common = 0.0
        self._seen = 0

    @property
    def won(self) -> bool:
        """Whether the worker's own fit is clearly better."""
        return self._seen >= TRUSTED and self._own < CLEARLY * self._common

    def judge(self, own: float, common: float, measured: float) -> None:
        """Two predictions, and what came."""
        self._seen += 1
        share = max(MEMORY, 1 / self._seen)
        self._own += share * (_wrong(own, measured) - self._own)
        self._common += share * (_wrong(common, measured) - self._common)


class Speed:
    """One worker's. `common` is shared by all."""

    def __init__(self, common: Fits) -> None:
        self._common = common
        self._own = Fits()
        self._prompts = _Contest()
        self._steps = _Contest()

    @property
    def prefill(self) -> PrefillFit:
        """What to believe of its prompts."""
        return (self._own if self._prompts.won else self._common).prefill

    @property
    def decode(self) -> DecodeModel:
        """What to believe of its decode steps."""
        return (self._own if self._steps.won else self._common).decode.model

    def prompt(self, own: Work, ahead: Work, *, begun: float, seconds: float, output: int = 0) -> None:
        """As `PrefillFit.observe`."""
        mine, common = self._own.prefill, self._common.prefill
        expected = [fit.expected(own, ahead, begun=begun, output=output) for fit in (mine, common)]
        self._prompts.judge(expected[0], expected[1], seconds)
        for fit in (mine, common):
            fit.observe(own, ahead, begun=begun, seconds=seconds, output=output)

    def step(self, rows: float, tokens: int, seconds: float) -> None:
        """As `DecodeFit.observe`, of a stream, whose steps were seen."""
        mine, common = self._own.decode, self._common.decode
        self._steps.judge(mine.model.step(rows, tokens), common.model.step(rows, tokens), seconds)
        for fit in (mine, common):
            fit.observe(rows, tokens, seconds)

    def presumed_step(self, rows: float, tokens: int) -> None:
        """Of a plain answer: what its prompt's fit says of output tokens, which proves nothing about either fit of steps."""
        for fit in (self._own.decode, self._common.decode):
            fit.observe(rows, tokens, self.prefill.token_s)


def _wrong(predicted: float, measured: float) -> float:
    return abs(predicted - measured) / max(predicted, measured, 1e-9)
