"""What one step may take on, and how much room running requests will still need.

`Budget` is asked for each piece of a prompt; `NewTokenRatio` estimates which share of their allowed output requests really use. The
ratio starts high, decays with every decode step, and jumps back when the estimate proved wrong (a retraction). The constants are SGLang's.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Budget", "NewTokenRatio"]

INITIAL_RATIO = 0.7
MINIMUM_SHARE = 0.14  # of the initial ratio
DECAY_STEPS = 600
CLIP_NEW_TOKENS = 4096  # no request is expected to write more than this


class NewTokenRatio:
    """Expected share of `max_new_tokens` that running requests will still write."""

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(INITIAL_RATIO * conservativeness, 1.0)
        self._minimum = self._initial * MINIMUM_SHARE
        self._decay = (self._initial - self._minimum) / DECAY_STEPS
        self.value = self._initial

    def decay(self) -> None:
        """One decode step went well."""
        self.value = max(self.value - self._decay, self._minimum)

    def reset(self) -> None:
        """A retraction: the estimate was too low."""
        self.value = self._initial

    def expected(self, remaining: int) -> int:
        """Tokens that a request allowed `remaining` more is expected to write."""
        return int(min(remaining, CLIP_NEW_TOKENS) * self.value)


@dataclass(slots=True)
class Budget:
    """Prompt tokens left in the step being planned. `cut`: a prompt may be split over several steps."""

    tokens: int
    cut: bool
    taken: int = 0

    @property
    def left(self) -> int:
        """Tokens that may still be taken."""
        return max(self.tokens - self.taken, 0)

    def piece(self, remaining: int) -> int:
        """How many of a prompt's `remaining` tokens fit now. A prompt that may not be cut and exceeds any step runs alone."""
        if self.cut:
            return min(remaining, self.left)
        return remaining if remaining <= self.left or self.taken == 0 else 0

    def take(self, tokens: int) -> None:
        """Spend prompt tokens."""
        self.taken += tokens
