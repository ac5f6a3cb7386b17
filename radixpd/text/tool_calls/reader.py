"""A parser of tool calls fed with text in pieces: one character at a time goes to a script, a generator that takes it with `yield`.

Invariant: the events, joined, do not depend on how the text was cut, since a script sees nothing but the next character (`END` behind
the last). What is taken while `holding` is kept back: `until` makes content of it, unless a call has begun meanwhile. So whatever is no
call after all is content, blanks and marks included, and no text makes a parser raise. One for each output; scripts are in the files of
the formats.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from typing import TypeVar

from radixpd.text.tool_calls.events import Arguments, Begun, Content, Ended, Event

__all__ = ["BLANKS", "END", "Malformed", "Reader", "Script", "Steps"]

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
Script = Callable[["Reader"], Steps[None]]

END = ""  # the character behind the last one; sets are asked for characters, since it is in every string
BLANKS = frozenset(" \t\r\n")


class Malformed(Exception):
    """This is no call, or no more of one. Never leaves a script."""


class Reader:
    """See the module. `names`: the functions that may be called; a call of another is content."""

    def __init__(self, script: Script, names: Collection[str]) -> None:
        self.char = END
        self.holding = False
        self._held: list[str] = []
        self._names = frozenset(names)
        self._open = False  # a call has begun and not ended
        self._behind_call = False  # nothing but blanks since one
        self._events: list[Event] = []
        self._run = self._primed(script)
        next(self._run)

    def feed(self, text: str) -> list[Event]:
        """What this text adds."""
        for self.char in text:
            next(self._run)
            if self.holding:
                self._held.append(self.char)
        return self._taken()

    def end(self) -> list[Event]:
        """The text has ended."""
        self.char = END
        for _ in self._run:
            raise AssertionError("a script takes nothing behind the end")
        return self._taken()

    # ---- for scripts ----------------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """From here on keep back what is taken."""
        self._held, self.holding = [], True

    def forget(self) -> str:
        """What was kept back; it is settled, and nothing more is kept."""
        held, self._held, self.holding = "".join(self._held), [], False
        return held

    def known(self, name: str) -> str:
        """The name of a function that may be called."""
        if name not in self._names:
            raise Malformed
        return name

    def begin(self, name: str) -> None:
        """A call: what was kept back was the beginning of it."""
        self.forget()
        self._open = self._behind_call = True
        self._events.append(Begun(name))

    def argue(self, text: str) -> None:
        """More of its arguments."""
        if self._events and isinstance(last := self._events[-1], Arguments):
            self._events[-1] = Arguments(last.text + text)
        else:
            self._events.append(Arguments(text))

    def finish(self) -> None:
        """Its arguments are whole."""
        self._open = False
        self._events.append(Ended())

    def until(self, *marks: str) -> Steps[str]:
        """Content up to a mark, which is kept back with the blanks before it; `END` if none comes. Blanks between a call and the end are
        dropped."""
        blanks, part = self.forget(), ""
        if self._open and self.char == END:
            return END  # cut short inside a call: what was kept back is no content
        self._open = False
        if blanks.strip(" \t\r\n"):
            self._say(blanks)
            blanks = ""
        while self.char != END:
            part += self.char
            while part and not any(mark.startswith(part) for mark in marks):
                if part[0] in BLANKS:
                    blanks += part[0]
                else:
                    self._say(blanks + part[0])
                    blanks = ""
                part = part[1:]
            if part in marks:
                self._held, self.holding = [blanks, part[:-1]], True
                yield
                return part
            yield
        if part or not self._behind_call:
            self._say(blanks + part)
        return END

    def mark(self, *marks: str) -> Steps[str]:
        """One of these marks, which stands here."""
        part = ""
        while part not in marks:
            part += self.char
            if self.char == END or not any(mark.startswith(part) for mark in marks):
                raise Malformed
            yield
        return part

    def blanks(self) -> Steps[None]:
        """Any blanks."""
        while self.char in BLANKS:
            yield

    def closing(self, *marks: str, more: str = END) -> Steps[str]:
        """One of these marks behind a call, after blanks; `more` announces another call and is kept back with it. `END` if something
        else stands there, which is content, or the text has ended."""
        self.hold()
        try:
            yield from self.blanks()
            found = yield from self.mark(*marks, *([more] if more else []))
        except Malformed:
            if self.char == END:
                self.forget()
            return END
        if found != more:
            self.forget()
        return found

    # ---- inner ----------------------------------------------------------------------------------------------------------------

    def _primed(self, script: Script) -> Steps[None]:
        yield
        yield from script(self)

    def _say(self, text: str) -> None:
        if not text:
            return
        self._behind_call = False
        if self._events and isinstance(last := self._events[-1], Content):
            self._events[-1] = Content(last.text + text)
        else:
            self._events.append(Content(text))

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events
