"""One output of a chat, read as it comes: what the model thinks, what it says, which tools it calls.

The same reading makes the plain answer and the stream, so they say the same. Invariant: text goes to the thought first, the rest of it to
the parser of tool calls, the rest of that is content; without either parser all of it is content. Called by the chat route, one for each
output.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from radixpd.text.reasoning import Splitter
from radixpd.text.tool_calls.events import Arguments, Begun, Content, Ended, Event
from radixpd.text.tool_calls.reader import Reader

__all__ = ["Call", "News", "Reading"]


@dataclass(slots=True)
class Call:
    """A call so far. `whole`: its arguments are complete."""

    name: str
    arguments: str = ""
    whole: bool = False


@dataclass(slots=True)
class News:
    """What a piece of text adds. `calls`: index of a call -> its name if it begins here, and more of its arguments."""

    thought: str = ""
    content: str = ""
    calls: dict[int, tuple[str | None, str]] = field(default_factory=dict)


class Reading:
    """See the module. Without `separate` thoughts are content, marks and all; calls beyond `most` are dropped."""

    def __init__(
        self, splitter: Splitter | None = None, reader: Reader | None = None, *, separate: bool = True, most: int | None = None
    ) -> None:
        self._splitter = splitter
        self._reader = reader
        self._separate = separate
        self._most = most
        self._text = ""  # where thoughts are content: all of the output
        self._told = 0
        self._dropping = False
        self.thought = ""
        self.content = ""
        self.calls: list[Call] = []

    def feed(self, text: str, *, last: bool = False) -> News:
        """More of the output; `last`: this is the end of it."""
        thought, said = self._splitter.feed(text) if self._splitter else ("", text)
        if last and self._splitter:
            more, rest = self._splitter.end()
            thought, said = thought + more, said + rest
        news = News(thought=thought)
        if not self._separate:
            news.thought, news.content = "", self._unsplit(text)
        self.thought += news.thought
        if self._reader is None:
            news.content += said
        else:
            events = self._reader.feed(said)
            for event in [*events, *(self._reader.end() if last else [])]:
                self._take(event, news)
        self.content += news.content
        return news

    @property
    def called(self) -> bool:
        """Whether tools are called, and the last call is whole."""
        return bool(self.calls) and self.calls[-1].whole

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside of a thought."""
        return self._splitter is not None and self._splitter.thinking

    @property
    def unanswered(self) -> int:
        """Characters at the beginning of the output that are no answer."""
        return self._splitter.read if self._splitter else 0

    def _unsplit(self, text: str) -> str:
        """More of what the splitter took for a thought, as it was written."""
        self._text += text
        start, self._told = self._told, max(self._told, self.unanswered)
        return self._text[start : self._told]

    def _take(self, event: Event, news: News) -> None:
        match event:
            case Content(text):
                news.content += text
            case Begun(name):
                self._dropping = len(self.calls) == self._most
                if not self._dropping:
                    self.calls.append(Call(name))
                    news.calls[len(self.calls) - 1] = (name, "")
            case _ if self._dropping:
                pass
            case Arguments(text):
                at = len(self.calls) - 1
                self.calls[at].arguments += text
                begun, before = news.calls.get(at, (None, ""))
                news.calls[at] = (begun, before + text)
            case Ended():
                self.calls[-1].whole = True
