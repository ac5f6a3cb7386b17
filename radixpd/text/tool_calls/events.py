"""What a parser of tool calls finds in a text, in the order of the text. Plain data.

Invariant: a call begins once, its arguments are pieces of one JSON object, and a call that never ends was cut short or broken off.
Made by `reader`, read by `text.reading`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Arguments", "Begun", "Content", "Ended", "Event"]


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is no part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class Begun:
    """A call of this function begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the last call's arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The last call's arguments are whole."""


Event = Content | Begun | Arguments | Ended
