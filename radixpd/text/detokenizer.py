"""Output tokens of one request -> text that is safe to show, and the end of the output at a stop string.

Invariant: the text shown and the match do not depend on how the output was cut into tokens or calls. The match that *ends* first wins
(of two that end together, the longer one), and only characters that may begin a stop string are held back. The tokenizer manager
owns one per request and sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from radixpd.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopMatch", "StopMatcher"]


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`kept`: output tokens up to and including the one whose text reaches the end of the match."""

    stop: str
    kept: int


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces (Knuth-Morris-Pratt, one state per stop string)."""

    __slots__ = ("_states", "_stops", "_tables")

    def __init__(self, stops: tuple[str, ...]) -> None:
        # Longest first: of two matches that end at the same character the longer one is found first.
        self._stops = sorted((stop for stop in dict.fromkeys(stops) if stop), key=len, reverse=True)
        self._tables = [_failures(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return max(self._states, default=0)

    def feed(self, text: str) -> tuple[int, str] | None:
        """Take more text; (position in it just after the match, stop string) at the first match."""
        if not self._stops:
            return None
        for position, char in enumerate(text):
            for index, stop in enumerate(self._stops):
                state, table = self._states[index], self._tables[index]
                while state and stop[state] != char:
                    state = table[state - 1]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    return position + 1, stop
                self._states[index] = state
        return None


def _failures(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return table


class Detokenizer:
    """See the module. `context` is what the output follows (the prompt); `keep_stop` shows the matched string too."""

    __slots__ = ("_held", "_keep_stop", "_matcher", "_shown", "_stream", "_tokens", "match")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        context: Sequence[int] | np.ndarray = (),
        stop: tuple[str, ...] = (),
        skip_special: bool = True,
        keep_stop: bool = False,
    ) -> None:
        self.match: StopMatch | None = None
        self._stream = tokenizer.stream(context, skip_special=skip_special)
        self._matcher = StopMatcher(stop)
        self._keep_stop = keep_stop
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
        rest, self._held = self._held, ""
        return self._show(safe + rest)

    def _take(self, text: str) -> str:
        """Pass text through the matcher; what of it, and of the text held before, is safe now."""
        if not text:
            return ""
        hit = self._matcher.feed(text)
        pending = self._held + text
        if hit is None:
            cut = len(pending) - self._matcher.held
            self._held = pending[cut:]
            return pending[:cut]
        position, stop = hit
        end = len(self._held) + position
        self.match = StopMatch(stop=stop, kept=self._tokens)
        self._held = ""
        return pending[: end if self._keep_stop else end - len(stop)]

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text
