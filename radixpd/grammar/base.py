"""What a grammar backend offers, and the registry. Backends are imported by name, when the first grammar is wanted.

A backend compiles in a child process (`compile`, then `pack`), and unpacks the result in the model runner. Invariant: whatever a `Matcher`
allows leads on to a complete text, and the end of sequence is allowed exactly where the text is complete. Called by `workshop`, `library`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from radixpd.core.request import Grammar

__all__ = ["BACKENDS", "Backend", "Compiled", "Matcher", "Vocabulary", "mask_words", "open_backend"]

BACKENDS = {"xgrammar": "radixpd.grammar.xgrammar", "llguidance": "radixpd.grammar.llguidance"}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The model's tokens as bytes, by id; empty for special tokens and for ids without text. `size`: rows of the model's logits."""

    tokens: list[bytes]
    size: int
    eos_ids: tuple[int, ...]


class Matcher(Protocol):
    """One output's place in its grammar."""

    def mask(self, row: np.ndarray) -> None:
        """Set bit t of `row`, int32 `[mask_words]`, for each token t that may come next; clear the others."""
        ...

    def accept(self, token: int) -> bool:
        """The token has come; False (and nothing changed that matters) when it may not come here."""
        ...

    def forced(self) -> str:
        """The text that must come next, as far as there is no choice; empty if there is one, or if the output may end."""
        ...

    def fork(self) -> Matcher:
        """Another output at the same place."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the end of sequence has come."""
        ...


class Compiled(Protocol):
    """A grammar that is ready to be matched. `size`: bytes of memory."""

    size: int

    def matcher(self) -> Matcher:
        """An output that begins."""
        ...


class Backend(Protocol):
    """One library over one vocabulary. Every method raises `GrammarError` for what is the client's fault."""

    def compile(self, grammar: Grammar) -> Compiled:
        """May take long, or for ever."""
        ...

    def pack(self, compiled: Compiled) -> bytes:
        """For another process."""
        ...

    def unpack(self, packed: bytes) -> Compiled:
        """What another process packed. Takes milliseconds."""
        ...


def mask_words(size: int) -> int:
    """int32 words of a mask over `size` tokens."""
    return (size + 31) // 32


def open_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """Import a backend and set it up. ImportError when its library is not installed."""
    build = cast("Callable[[Vocabulary], Backend]", importlib.import_module(BACKENDS[name]).build)
    return build(vocabulary)
