"""What a grammar cannot say: one exception for all files of this folder. Whoever catches it knows the field and makes it a `BadRequest`."""

from __future__ import annotations

import re

__all__ = ["GrammarError", "first_line"]

LONGEST = 300


class GrammarError(ValueError):
    """The client's grammar cannot be served; the message says what of it."""


def first_line(error: Exception) -> str:
    """A library's message as one line for a client: without its time stamp and the place in its source."""
    text = " ".join(str(error).split())
    return re.sub(r"^(\[[0-9:]+\]\s*)?(/\S+:[0-9]+:\s*)?", "", text)[:LONGEST] or "the grammar cannot be read"
