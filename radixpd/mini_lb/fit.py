"""How fast a worker is, learned from what it does: recursive least squares with forgetting, bounded by Huber's rule.

`PrefillFit` and `DecodeFit` turn one observation at a time into the models of `snapshot`. Invariants: a single observation, however wrong,
pulls no harder than an ordinary one, and a lasting change is learned all the same (several surprises in a row to the same side make the fit
unsure again); uncertainty never grows beyond the prior's, however little a worker's requests vary; no predicted time is negative. Used by
`dispatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from radixpd.mini_lb.snapshot import DecodeModel, PrefillModel

__all__ = ["DecodeFit", "LeastSquares", "PrefillFit", "Work"]

MEMORY = 50  # observations that count
OUTLIER = 3.0  # recent mean errors beyond which an observation's pull grows no further
NOISE = 0.1  # of a measurement, as a share of it
LEAST_S = 0.001  # times shorter than this are as noisy as this
ERROR_MEMORY = 0.1  # share of the newest error in that mean
SHARES = (1.0, 0.5, 0.0)
WARM_UP = 4  # observations that are taken as they are
SURPRISES = 5  # outliers in a row, all too high or all too low, that are no accident any more
SCALE = 1000.0  # tokens: keeps the features near 1
PREFILL, DECODE = PrefillModel(), DecodeModel()


class LeastSquares:
    """Coefficients of a linear model, and how sure they are. `spread`: the prior's variance for each; `memory`: observations that count."""

    def __init__(self, prior: Sequence[float], spread: Sequence[float], memory: int = MEMORY) -> None:
        self._kept = 1 - 1 / memory  # weight of an observation after one more
        self.values = list(prior)
        self._spread = list(spread)
        self._cov = self._unsure()
        self._error = 0.0
        self._surprises = 0  # outliers in a row; negative: too low
        self.seen = 0

    def predict(self, features: Sequence[float]) -> float:
        """The model's value."""
        value: float = sum(map(mul, self.values, features))
        return value

    def positive(self) -> list[float]:
        """The likeliest coefficients none of which is negative: what is below 0 becomes 0, and what varies with it moves along."""
        values, cov, size = list(self.values), [list(row) for row in self._cov], range(len(self.values))
        while (low := min(size, key=lambda i: values[i])) is not None and values[low] < 0:
            move = [cov[i][low] / cov[low][low] if cov[low][low] > 0 else 0.0 for i in size]
            values = [value - step * values[low] for value, step in zip(values, move)]
            cov = [[cov[i][j] - move[i] * cov[low][j] for j in size] for i in size]
            values[low] = 0.0
        return values

    def variance(self, features: Sequence[float]) -> float:
        """How unsure `predict` is."""
        size = range(len(self.values))
        return sum(features[i] * self._cov[i][j] * features[j] for i in size for j in size)

    def observe(self, features: Sequence[float], measured: float) -> None:
        """One observation."""
        predicted = self.predict(features)
        error = measured - predicted
        noise = (NOISE * max(abs(measured), abs(predicted), LEAST_S)) ** 2
        if self.seen >= WARM_UP:
            error = self._tamed(error, OUTLIER * max(self._error, 0.02 * abs(measured), 1e-6))
        self._error = abs(error) if self.seen == 0 else (1 - ERROR_MEMORY) * self._error + ERROR_MEMORY * abs(error)
        self.seen += 1
        pulled = [sum(map(mul, row, features)) for row in self._cov]
        known = sum(map(mul, features, pulled))
        if known <= 0:
            return
        self.values = [value + pull * error / (noise + known) for value, pull in zip(self.values, pulled)]
        # Forget only what is observed anew: a worker that sees nothing but short prompts for an hour keeps what it learned of long ones.
        shrink = (self._kept * known - (1 - self._kept) * noise) / (self._kept * known * (noise + known))
        self._cov = [[cov - shrink * own * other for cov, other in zip(row, pulled)] for row, own in zip(self._cov, pulled)]

    def _tamed(self, error: float, bound: float) -> float:
        if abs(error) <= bound:
            self._surprises = 0
            return error
        sign = 1 if error > 0 else -1
        self._surprises = self._surprises + sign if self._surprises * sign > 0 else sign
        if abs(self._surprises) < SURPRISES:
            return sign * bound
        self._surprises = 0
        self._cov = self._unsure()
        return error

    def _unsure(self) -> list[list[float]]:
        size = range(len(self._spread))
        return [[self._spread[i] if i == j else 0.0 for j in size] for i in size]


class Work(NamedTuple):
    """Prompts as the prefill model sees them: how many, their uncached tokens, and `new * (new + 2 * cached)`."""

    prompts: int = 0
    tokens: int = 0
    squares: int = 0

    @staticmethod
    def of(new: int, cached: int) -> Work:
        """One prompt."""
        return Work(1, new, new * (new + 2 * cached))


class PrefillFit:
    """Fits `a + b*sum(n) + c*sum(n^2)` to times to first token, and how much of the work ahead a prompt waits for.

    Prompts may be computed one after the other (`queueing` 1) or side by side (0). Speed and share explain each other's errors, so that
    fitting them in turns gets stuck; instead the speed is fitted under each of a few shares, and the one that predicts best is believed.
    """

    def __init__(self, prior: PrefillModel = PREFILL, memory: int = MEMORY) -> None:
        b, c = prior.b * SCALE, prior.c * SCALE**2
        # What prompts of one length cannot tell apart goes to the linear part: the others start out nearly sure.
        self._fits = [LeastSquares((prior.a, b, c, DECODE.base), (0.0025, 4.0, 0.01, 0.01), memory) for _ in SHARES]
        self._fresh = 5 / memory  # share of the newest in the mean errors
        self._wrong = [0.0 for _ in SHARES]  # recent relative error of each
        self.model = prior
        self.queueing = SHARES[0]  # share of the work ahead that a prompt waits for
        self.token_s = DECODE.base  # per output token, as far as plain answers tell
        self.seen = 0

    def seconds(self, work: Work) -> float:
        """How long so much work takes."""
        return self.model.a * work.prompts + self.model.b * work.tokens + self.model.c * work.squares

    def expected(self, own: Work, ahead: Work, *, begun: float, output: int = 0) -> float:
        """What `observe` should be told, by what is known so far."""
        return self.seconds(own) + self.queueing * max(0.0, self.seconds(ahead) - begun) + self.token_s * output

    def observe(self, own: Work, ahead: Work, *, begun: float, seconds: float, output: int = 0) -> None:
        """A prompt got its first token after so many `seconds`, or, where nobody saw that, all of `output` tokens.

        `ahead`: what waited when it came; the first of that had been at work for `begun` seconds.
        """
        self.seen += 1
        for at, (share, fit) in enumerate(zip(SHARES, self._fits)):
            prompts, tokens, squares = (mine + share * other for mine, other in zip(own, ahead))
            features = (prompts, tokens / SCALE, squares / SCALE**2, output)
            predicted = fit.predict(features) - share * begun
            wrong = abs(seconds - predicted) / max(seconds, abs(predicted), 1e-6)
            self._wrong[at] += self._fresh * (wrong - self._wrong[at])
            fit.observe(features, seconds + share * begun)
        best = min(range(len(SHARES)), key=lambda at: self._wrong[at])
        a, b, c, self.token_s = self._fits[best].positive()
        self.model = PrefillModel(a, max(b / SCALE, 1e-9), c / SCALE**2)
        self.queueing = SHARES[best]


class DecodeFit:
    """Fits `base + per_row * rows + per_token * tokens`."""

    def __init__(self, prior: DecodeModel = DECODE, memory: int = MEMORY) -> None:
        self._fit = LeastSquares((prior.base, prior.per_row, prior.per_token * SCALE), (0.01, 1e-4, 1e-7), memory)
        self._model = prior

    @property
    def model(self) -> DecodeModel:
        """The fit so far."""
        return self._model

    def observe(self, rows: float, tokens: float, seconds: float) -> None:
        """An output token took so long while `rows` requests with `tokens` tokens in all were running."""
        self._fit.observe((1.0, rows, tokens / SCALE), seconds)
        base, per_row, per_token = self._fit.positive()
        self._model = DecodeModel(base, per_row, per_token / SCALE)
