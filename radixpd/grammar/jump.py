"""One output in its grammar: the mask of its next token, and the tokens that the grammar leaves no choice about.

Where the grammar forces a text, its *canonical* tokens come: those that the tokenizer itself makes of it, except the last, which might
grow together with what follows. Then the mask allows only the next of them. So the tokens are the same whether a caller takes a forced
run at once (`forced`) or one by one. Invariant: the state depends on nothing but the grammar and the tokens accepted so far, so it can be
rebuilt from them anywhere. Held by `engine.constraints`, one for each slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from radixpd.grammar.base import Matcher
from radixpd.grammar.errors import GrammarError

__all__ = ["Encode", "Guide"]

Encode = Callable[[str], list[int]]  # the canonical tokens of a text that stands inside another; empty where there are none


class Guide:
    """See above."""

    def __init__(self, matcher: Matcher, encode: Encode) -> None:
        self._matcher = matcher
        self._encode = encode
        self._queue: list[int] | None = None  # forced tokens not yet accepted, the next one last; None: not looked at yet

    @property
    def ended(self) -> bool:
        """The end of sequence has come: nothing may follow."""
        return self._matcher.ended

    def mask(self, row: np.ndarray) -> None:
        """Set the bits of what may come next in `row`, int32 `[mask_words]`. Raises `GrammarError` when that is nothing."""
        if queue := self._forced():
            row[:] = 0
            row.view(np.uint32)[queue[-1] // 32] = np.uint32(1 << queue[-1] % 32)
            return
        self._matcher.mask(row)
        if not row.any():
            raise GrammarError("the grammar allows nothing here")

    def accept(self, token: int) -> None:
        """The token has come. Raises `GrammarError` if it may not."""
        queue = self._forced()
        if not self._matcher.accept(token):
            raise GrammarError(f"token {token} does not fit the grammar")
        if queue and queue[-1] == token:
            queue.pop()
        self._queue = queue or None

    def replay(self, tokens: Iterable[int]) -> None:
        """Tokens of an earlier attempt, or of another server."""
        for token in tokens:
            self.accept(token)

    def take_forced(self, most: int) -> list[int]:
        """The tokens that must come next, now accepted; at most so many."""
        taken: list[int] = []
        while len(taken) < most and (queue := self._forced()):
            taken.append(queue[-1])
            self.accept(taken[-1])
        return taken

    def _forced(self) -> list[int]:
        if self._queue is None:
            text = "" if self.ended else self._matcher.forced()
            self._queue = self._encode(text)[:-1][::-1] if text else []
        return self._queue
