"""Which of several texts to choose, by the log-probabilities of their tokens. Pure functions; no method looks at anything but `Scores`.

The scores cover the same stretch for all choices: from the first token in which they differ, in the context of the prompt. So what they
have in common counts for nobody, and a space on either side of the border between prompt and choice changes nothing. Called by the
interpreter; the backends make the scores, with `first_difference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["ChoicesMethod", "Decision", "Scores", "decide", "first_difference"]


class ChoicesMethod(Enum):
    """How choices are compared; the value is SGLang's name.

    `TOKEN_LENGTH_NORMALIZED`: the highest mean log-probability of a token. It favours long choices whose later tokens follow from their
    first ones.
    `GREEDY_TOKEN_SELECTION`: the highest first token, among equals the highest second one, and so on; a choice that has ended goes on
    with its mean. What greedy decoding would go towards.
    `UNCONDITIONAL_LIKELIHOOD_NORMALIZED`: the highest mean of what the prompt adds to the log-probability of each token, so that words
    which are common anyway do not win. Costs a second scoring, without the prompt.
    """

    TOKEN_LENGTH_NORMALIZED = "token_length_normalized"
    GREEDY_TOKEN_SELECTION = "greedy_token_selection"
    UNCONDITIONAL_LIKELIHOOD_NORMALIZED = "unconditional_likelihood_normalized"

    @classmethod
    def of(cls, method: ChoicesMethod | str) -> ChoicesMethod:
        """The method, or the one with this name."""
        try:
            return cls(method)
        except ValueError:
            raise ValueError(f"choices_method must be one of {', '.join(each.value for each in cls)}, got {method!r}") from None


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of the tokens of each choice, and the same without the prompt, if that was asked for. `details` is whatever else
    the backend tells: it lands in the meta information of the variable."""

    logprobs: tuple[tuple[float, ...], ...]
    unconditional: tuple[tuple[float, ...], ...] | None = None
    details: dict[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Index of the chosen text, and a figure for each: the highest wins (`-inf`: out before the last token)."""

    index: int
    figures: tuple[float, ...]


def decide(method: ChoicesMethod, scores: Scores) -> Decision:
    """Choose; among equals the first."""
    return METHODS[method](scores)


def first_difference(prompt: Sequence[Hashable], wholes: Sequence[Sequence[Hashable]]) -> int:
    """Position from which the tokens of prompt-and-choice are scored: the first in which not all `wholes` agree.

    Where one choice is the beginning of all others (or is the only one), that is no position inside it; then it is the first in which they
    depart from the prompt. Each choice has a token from there on, unless its tokens are all in the prompt.
    """
    start = _common(wholes)
    shortest = min(map(len, wholes))
    if start < shortest:
        return start
    return min(_common([prompt, *wholes]), shortest - 1)


def _common(rows: Sequence[Sequence[Hashable]]) -> int:
    """How many elements all rows begin with."""
    columns = zip(*rows, strict=False)
    return next((index for index, column in enumerate(columns) if len(set(column)) > 1), min(map(len, rows)))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _best(figures: Sequence[float]) -> Decision:
    return Decision(figures.index(max(figures)), tuple(figures))


def _token_mean(scores: Scores) -> Decision:
    return _best([_mean(row) for row in scores.logprobs])


def _greedy(scores: Scores) -> Decision:
    left = list(range(len(scores.logprobs)))
    figures = [-math.inf] * len(scores.logprobs)
    for position in range(max(map(len, scores.logprobs))):
        here = {index: row[position] if position < len(row := scores.logprobs[index]) else _mean(row) for index in left}
        best = max(here.values())
        left = [index for index in left if here[index] == best]
        if len(left) == 1:
            break
    for index in left:
        figures[index] = _mean(scores.logprobs[index])
    return Decision(left[0], tuple(figures))


def _what_the_prompt_adds(scores: Scores) -> Decision:
    assert scores.unconditional is not None
    pairs = zip(scores.logprobs, scores.unconditional, strict=True)
    return _best([_mean([given - bare for given, bare in zip(row, alone, strict=True)]) for row, alone in pairs])


METHODS: dict[ChoicesMethod, Callable[[Scores], Decision]] = {
    ChoicesMethod.TOKEN_LENGTH_NORMALIZED: _token_mean,
    ChoicesMethod.GREEDY_TOKEN_SELECTION: _greedy,
    ChoicesMethod.UNCONDITIONAL_LIKELIHOOD_NORMALIZED: _what_the_prompt_adds,
}
