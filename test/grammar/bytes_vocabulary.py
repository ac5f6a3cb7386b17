"""A vocabulary of single bytes for grammar tests: ids 0 to 2 are special, id 2 ends a sequence, byte b is token b + 3."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from radixpd.grammar.base import Backend, Compiled, Vocabulary, mask_words, open_backend
from radixpd.grammar.jump import Guide

__all__ = ["EOS", "SIZE", "VOCABULARY", "allowed", "backend", "encode", "write"]

EOS = 2
SIZE = 259
VOCABULARY = Vocabulary([b"", b"", b"", *(bytes([byte]) for byte in range(256))], SIZE, (EOS,))
CLOSING = {ord(char) + 3 for char in '"}]'} | {EOS}

_opened: dict[str, Backend] = {}


def backend(name: str) -> Backend:
    """A backend over this vocabulary; each is opened once."""
    if name not in _opened:
        _opened[name] = open_backend(name, VOCABULARY)
    return _opened[name]


def encode(text: str) -> list[int]:
    """Canonical tokens of a text."""
    return [byte + 3 for byte in text.encode()]


def allowed(guide: Guide) -> list[int]:
    """Tokens that may come next."""
    row = np.zeros(mask_words(SIZE), dtype=np.int32)
    guide.mask(row)
    return [int(token) for token in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:SIZE])]


@dataclass(frozen=True)
class Text:
    """What was written, whether to its end, and in how many steps."""

    data: bytes
    ended: bool
    steps: int


def write(compiled: Compiled, seed: int, *, most: int = 400, jump: bool = False) -> Text:
    """A random text of the grammar, the sooner closed the longer it gets."""
    guide, chance = Guide(compiled.matcher(), encode), random.Random(seed)
    tokens: list[int] = []
    steps = 0
    while len(tokens) < most:
        steps += 1
        options = allowed(guide)
        closing = [token for token in options if token in CLOSING]
        token = chance.choice(closing if closing and chance.random() < 0.2 + len(tokens) / most else options)
        guide.accept(token)
        if token == EOS:
            return Text(bytes(each - 3 for each in tokens), True, steps)
        tokens += [token, *(guide.take_forced(most) if jump else ())]
    return Text(bytes(each - 3 for each in tokens), False, steps)
