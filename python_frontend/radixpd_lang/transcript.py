"""What the model has been told so far: a text, or a conversation whose last turn may be open.

`Prompt` is a moment of it, and what backends get; `Transcript` grows. A program either writes plain text or uses roles, never both.
Invariant: text only grows at the end, so every prompt of a program begins with the ones before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["ROLES", "Message", "Prompt", "Transcript", "common_prompt"]

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Message:
    """A finished turn."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """Finished turns, then the text of the open turn of `role`. Without turns and role: plain text."""

    messages: tuple[Message, ...] = ()
    role: str | None = None
    text: str = ""

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return bool(self.messages) or self.role is not None

    @property
    def turns(self) -> tuple[Message, ...]:
        """Finished turns and the open one."""
        return self.messages + ((Message(self.role, self.text),) if self.role else ())

    @property
    def size(self) -> int:
        """Characters in it."""
        return sum(len(message.content) for message in self.messages) + len(self.text)

    def __str__(self) -> str:
        """For people: each turn after its role. Plain text as it is."""
        if not self.is_chat:
            return self.text
        turns = [f"{message.role}: {message.content}\n" for message in self.messages]
        return "".join(turns) + (f"{self.role}: {self.text}" if self.role else "")


class Transcript:
    """The prompt of one branch while it grows. `known`: characters that the server has seen in a prompt of this branch, or written."""

    def __init__(self, prompt: Prompt | None = None, known: int = 0) -> None:
        self._turns: list[Message] = list(prompt.messages) if prompt else []
        self._role = prompt.role if prompt else None
        self._parts = [prompt.text] if prompt and prompt.text else []
        self.known = known

    def prompt(self) -> Prompt:
        """What it is now."""
        self._parts = ["".join(self._parts)]
        return Prompt(tuple(self._turns), self._role, self._parts[0])

    def copy(self) -> Transcript:
        """Another one with the same past."""
        return Transcript(self.prompt(), self.known)

    def append(self, text: str) -> str:
        """Add text; what people see of it."""
        if self._turns and self._role is None:
            raise ValueError(f"text between two turns: put it into {', '.join(f'{role}()' for role in ROLES)}")
        self._parts.append(text)
        return text

    def begin(self, role: str) -> str:
        """Open a turn; what people see of it."""
        if self._role is not None:
            raise ValueError(f"a {role} turn inside the {self._role} turn: end that one first")
        if any(self._parts):
            raise ValueError("text outside a turn, then a role: a program either writes plain text or uses roles")
        self._role = role
        return f"{role}: "

    def end(self, role: str) -> str:
        """Close the open turn; what people see of it."""
        if self._role != role:
            raise ValueError(f"the {role} turn ends here, but {'none' if self._role is None else f'the {self._role} turn'} is open")
        self._turns.append(Message(role, "".join(self._parts)))
        self._parts, self._role = [], None
        return "\n"


def common_prompt(one: Prompt, other: Prompt) -> Prompt:
    """The longest prompt that both begin with."""
    if one.is_chat != other.is_chat:
        return Prompt()
    if not one.is_chat:
        return Prompt(text=_common(one.text, other.text))
    turns = list(zip(one.turns, other.turns, strict=False))
    same = next((index for index, (left, right) in enumerate(turns) if left != right), len(turns))
    messages = min(same, len(one.messages), len(other.messages))
    start = Prompt(one.messages[:messages])
    if messages == len(turns):
        return start
    left, right = turns[messages]
    text = _common(left.content, right.content)
    return replace(start, role=left.role, text=text) if left.role == right.role and text else start


def _common(one: str, other: str) -> str:
    """What both texts begin with."""
    length = next((index for index, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), min(len(one), len(other)))
    return one[:length]
