"""Where in a program something was asked for: the file and line outside this package that is running.

Errors of a program carry it, because what a line asks for happens later and elsewhere. Taken by every primitive and every operation on a
state.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Place", "here", "place_of"]

OWN = (str(Path(__file__).parent) + os.sep, contextlib.__file__)  # a `with` of ours passes through contextlib


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a program."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def here() -> Place:
    """The innermost line on the stack that is not this package's own."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OWN):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)


def place_of(error: BaseException) -> Place:
    """The outermost line outside this package that the error came through: that of the program."""
    step = error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if not file.startswith(OWN):
            return Place(file, step.tb_lineno)
        step = step.tb_next
    return here()
