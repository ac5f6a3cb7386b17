"""What a model thinks before it answers: `<think>` ... `</think>`, told apart from the answer as the text comes.

Blanks inside and behind the marks belong to them. Invariant: the two texts, joined, do not depend on how the output was cut into pieces;
what is held back is a mark that may be beginning and blanks that may be its own. The parsers are found by name in `PARSERS`. Called by
`reading`, one splitter for each output.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["BEGIN", "END", "PARSERS", "Splitter", "Thinking", "starts_inside"]

BEGIN, END = "<think>", "</think>"
BLANKS = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a family of models thinks. `forced`: an output is thought from its first character on, whether or not it says so."""

    forced: bool = False


# The names are SGLang's.
PARSERS = {"deepseek-r1": Thinking(forced=True), "qwen3": Thinking(), "qwen3-thinking": Thinking(forced=True)}


def starts_inside(thinking: Thinking, prompt: str, *, continues: str | None = None) -> bool | None:
    """Whether an output behind this prompt begins inside of a thought; None: its own first characters tell. Templates end a prompt with
    the opening mark, or with an empty thought to switch thinking off. `continues`: the message that the output goes on with."""
    if continues is not None:
        return continues.rfind(BEGIN) > continues.rfind(END)
    tail = prompt.rstrip(BLANKS)
    if tail.endswith(BEGIN):
        return True
    if tail.endswith(END):
        return False
    return True if thinking.forced else None


class _At(Enum):
    START = "start"  # it is not known yet whether there is a thought
    OPENING = "opening"  # in one, before its first character
    THOUGHT = "thought"
    BEHIND = "behind"  # blanks behind the closing mark
    ANSWER = "answer"


class Splitter:
    """See the module. `inside`: as `starts_inside` says. `read` counts the characters up to the end of the closing mark."""

    def __init__(self, *, inside: bool | None) -> None:
        self._at = {True: _At.OPENING, False: _At.ANSWER, None: _At.START}[inside]
        self._marked = inside is True  # an opening mark may be repeated
        self._rest = ""
        self._fed = 0
        self._closed: int | None = None

    def feed(self, text: str) -> tuple[str, str]:
        """What this text adds to the thought and to the answer."""
        self._rest += text
        self._fed += len(text)
        return self._step()

    def end(self) -> tuple[str, str]:
        """What was held back."""
        rest, self._rest = self._rest, ""
        match self._at:
            case _At.BEHIND:
                return "", ""
            case _At.OPENING | _At.THOUGHT:
                return rest, ""
        return "", rest

    @property
    def read(self) -> int:
        """Characters of the output so far that are no answer."""
        if self._closed is not None:
            return self._closed
        return self._fed if self._at in (_At.OPENING, _At.THOUGHT) else 0

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside of a thought."""
        return self._at in (_At.OPENING, _At.THOUGHT)

    def _step(self) -> tuple[str, str]:
        thought = answer = ""
        if self._at is _At.START:
            self._start()
        if self._at is _At.OPENING:
            self._open()
        if self._at is _At.THOUGHT:
            thought = self._think()
        if self._at is _At.BEHIND and (rest := self._rest.lstrip(BLANKS)):
            self._at, self._rest = _At.ANSWER, rest
        if self._at is _At.ANSWER:
            answer, self._rest = self._rest, ""
        return thought, answer

    def _start(self) -> None:
        text = self._rest.lstrip(BLANKS)
        if text.startswith(BEGIN):
            self._at, self._rest = _At.OPENING, text[len(BEGIN) :]
        elif not BEGIN.startswith(text):
            self._at = _At.ANSWER

    def _open(self) -> None:
        text = self._rest.lstrip(BLANKS)
        if self._marked and text.startswith(BEGIN):
            self._marked, self._rest = False, text[len(BEGIN) :]
            self._open()
        elif text and not (self._marked and BEGIN.startswith(text)):
            self._at, self._rest = _At.THOUGHT, text

    def _think(self) -> str:
        thought, found, rest = self._rest.partition(END)
        if found:
            self._at, self._rest = _At.BEHIND, rest
            self._closed = self._fed - len(rest)
            return thought.rstrip(BLANKS)
        kept = next((size for size in range(len(END) - 1, 0, -1) if self._rest.endswith(END[:size])), 0)
        safe = self._rest[: len(self._rest) - kept].rstrip(BLANKS)
        self._rest = self._rest[len(safe) :]
        return safe
