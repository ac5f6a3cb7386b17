"""Every exception that this package raises on purpose.

    LangError
    ├── BackendError        the model's server refused, failed, or was silent for too long
    └── ProgramError        a program ended; says at which of its lines
        ├── ProgramTimeout      not finished in the time it was given (also a `TimeoutError`)
        └── ProgramCancelled    somebody called `cancel()`

Wrong arguments are the usual `TypeError`, `ValueError` and `KeyError`, raised at the line that gives them.
"""

from __future__ import annotations

from typing import Self

from radixpd_lang.place import Place

__all__ = ["BackendError", "LangError", "ProgramCancelled", "ProgramError", "ProgramTimeout"]


class LangError(Exception):
    """Root of the tree."""


class BackendError(LangError):
    """A request to a backend failed. `status` is the HTTP status if there was one, `param` the field that the server named."""

    def __init__(self, message: str, *, status: int | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class ProgramError(LangError):
    """A program ended at `place`, the line that asked for what went wrong; the exception behind it is the `__cause__`."""

    def __init__(self, message: str, place: Place, cause: BaseException | None = None) -> None:
        super().__init__(f"{place}: {message}")
        self.message = message
        self.place = place
        self.__cause__ = cause
        self.seen = False  # some reader of the program has been told

    def again(self) -> Self:
        """The same error as a new exception: one error may be raised in several threads, and each adds its own traceback."""
        self.seen = True
        return type(self)(self.message, self.place, self.__cause__)


class ProgramTimeout(ProgramError, TimeoutError):
    """The program did not finish in its time."""


class ProgramCancelled(ProgramError):
    """The program was cancelled."""
