"""Output tokens of one request -> text that is safe to show, and the end of the output at a stop string or pattern.

Invariant: the text shown and the match do not depend on how the output was cut into tokens or calls, except that no match counts before
the least number of tokens. Only characters that may belong to a match are held back. The tokenizer manager makes one per sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from radixpd.text.stop import StopHit, StopMatcher, StopRules
from radixpd.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopMatch"]


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`kept`: output tokens up to and including the one whose text completes the match."""

    stop: str
    kept: int


class Detokenizer:
    """See the module. `context` is what the output follows (the prompt); `keep_stop` shows the matched text too; a match that is complete
    before `least` tokens does not count."""

    __slots__ = ("_held", "_keep_stop", "_least", "_matcher", "_shown", "_stream", "_tokens", "match")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        context: Sequence[int] | np.ndarray = (),
        rules: StopRules | None = None,
        skip_special: bool = True,
        keep_stop: bool = False,
        least: int = 0,
    ) -> None:
        self.match: StopMatch | None = None
        self._stream = tokenizer.stream(context, skip_special=skip_special)
        self._matcher = StopMatcher(rules or StopRules())
        self._keep_stop = keep_stop
        self._least = least
        self._shown: list[str] = []
        self._held = ""
        self._tokens = 0

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return "".join(self._shown)

    def push(self, ids: Iterable[int]) -> str:
        """Take output tokens; the text that became safe. After a match further ids are ignored."""
        safe = []
        for id in ids:
            if self.match is not None:
                break
            self._tokens += 1
            safe.append(self._take(self._stream.push(int(id))))
        return self._show("".join(safe))

    def finish(self) -> str:
        """The output has ended: the last of the text (an incomplete character shows as U+FFFD)."""
        if self.match is not None:
            return ""
        safe = self._take(self._stream.flush())
        if self.match is None and (hit := self._matcher.finish()) is not None and self._armed:
            safe += self._end(self._held, len(self._held), hit)
        rest, self._held = self._held, ""
        return self._show(safe + rest)

    @property
    def _armed(self) -> bool:
        return self._tokens >= self._least

    def _take(self, text: str) -> str:
        """Pass text through the matcher; what of it, and of the text held before, is safe now."""
        if not text:
            return ""
        hit = self._matcher.feed(text, armed=self._armed)
        pending = self._held + text
        if hit is not None:
            return self._end(pending, len(self._held) + hit.end, hit)
        cut = len(pending) - self._matcher.held
        self._held = pending[cut:]
        return pending[:cut]

    def _end(self, pending: str, end: int, hit: StopHit) -> str:
        """A match that ends at `end` of `pending`: what of that is shown."""
        self.match = StopMatch(stop=hit.rule, kept=self._tokens)
        self._held = ""
        return pending[: end if self._keep_stop else end - hit.size]

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text
