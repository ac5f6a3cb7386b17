"""Prompts of exactly so many tokens, as text or as ids, without asking the tokenizer for each of them.

`Pieces` holds texts that are one token each and stay one token each when joined (checked against the tokenizer when it is made), so n
pieces are n tokens, plus what the tokenizer adds around a text (`overhead`: a begin-of-sequence token, for example). Random sequences of
pieces never share a page by accident. Called by the datasets of `workloads` and `traces`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from radixpd.errors import ConfigError
from radixpd.text.chat import load_chat_template
from radixpd.text.tokenizer import load_tokenizer

__all__ = ["LocalTokenizer", "Pieces", "Tokenizer", "find_pieces", "rng_for"]

WORDS = """
about above across act add after again age agree air all allow also always among and animal answer any apple arm art ask baby back bad
ball bank base bear beat bed before begin behind believe bell best better big bird black blood blow blue board boat body bone book both
box boy branch bread break bring brother brown build burn business but buy call can car care carry case catch cause cell center chair
chance change check child choose church city class clean clear climb clock close cloud coast coat cold color come common cook cool copy
corn corner cost count country course cover cow create cross cry current cut dance dark day dead deal dear death decide deep desk dinner
direct do doctor dog door down draw dream dress drink drive drop dry duck during each ear early earth ease east eat edge egg eight
either end energy engine enough enter equal even evening event ever every exact eye face fact fair fall family far farm fast fat father
fear feed feel feet few field fight figure fill final find fine finger finish fire first fish fit five flat floor flow flower fly follow
food foot for force forest form four free fresh friend from front fruit full game garden gas gave general get girl give glad glass go
gold good grand grass gray great green ground group grow guess guide gun hair half hand happen happy hard has hat have head hear heart
heat heavy held help here high hill his history hit hold hole home hope horse hot hotel hour house how huge human hundred hunt
""".split()  # noqa: SIM905 - a list literal would take a page
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
LEAST_PIECES = 20
TRIAL_LENGTHS = (1, 7, 64, 64, 200)


class Tokenizer(Protocol):
    """What datasets need of a tokenizer; `LocalTokenizer` reads files, `target.ServerTokenizer` asks a running server."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text as the server makes them from a plain prompt, begin-of-sequence included."""
        ...

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation through the model's chat template, ready for the assistant's turn."""
        ...


class LocalTokenizer:
    """A tokenizer read from a directory, in this process."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._tokenizer = load_tokenizer(self._directory)
        self.vocab_size = self._tokenizer.vocab_size
        self.special_ids = self._tokenizer.special_ids

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._tokenizer.encode(text).tolist() for text in texts]

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        template = load_chat_template(self._directory)
        if template is None:
            raise ConfigError(f"the model in {self._directory} has no chat template")
        ids: list[int] = self._tokenizer.encode(template.render(messages), special=False).tolist()
        return ids


def rng_for(*key: int | str) -> np.random.Generator:
    """A generator of its own for each key: what one dataset part draws never shifts another's numbers."""
    # The length at the end: numpy takes keys that differ only in trailing zeros for the same.
    return np.random.default_rng([*(zlib.crc32(part.encode()) if isinstance(part, str) else part for part in key), len(key)])


@dataclass(frozen=True, slots=True)
class Pieces:
    """Texts of one token each. A prompt of n tokens is `n - overhead` of them."""

    texts: tuple[str, ...]
    overhead: int

    def draw(self, rng: np.random.Generator, tokens: int) -> list[int]:
        """Indices of so many random pieces."""
        indices: list[int] = rng.integers(len(self.texts), size=max(tokens, 0)).tolist()
        return indices

    def text(self, indices: Sequence[int]) -> str:
        """The text of these pieces."""
        return "".join([self.texts[index] for index in indices])

    def prompt(self, rng: np.random.Generator, tokens: int) -> str:
        """A random prompt of `tokens` tokens, of which `overhead` are the tokenizer's own; at least one piece."""
        return self.text(self.draw(rng, max(tokens - self.overhead, 1)))


def find_pieces(tokenizer: Tokenizer) -> Pieces:
    """Words that are one token each, or letters where the tokenizer has no words."""
    for candidates in ([" " + word for word in WORDS], LETTERS):
        if (pieces := _additive(tokenizer, tuple(candidates))) is not None:
            return pieces
    raise ConfigError("this tokenizer has no words or letters of one token each: use --dataset-name random-ids")


def _additive(tokenizer: Tokenizer, candidates: tuple[str, ...]) -> Pieces | None:
    """Those candidates that add exactly one token, when trial texts of several lengths confirm that they do together."""
    base = len(tokenizer.encode([candidates[0] * 2])[0])
    lengths = [len(ids) for ids in tokenizer.encode([candidates[0] * 2 + candidate for candidate in candidates])]
    kept = tuple(candidate for candidate, length in zip(candidates, lengths) if length == base + 1)
    if len(kept) < LEAST_PIECES:
        return None
    rng = rng_for("pieces")
    trials = ["".join(kept[index] for index in rng.integers(len(kept), size=length)) for length in TRIAL_LENGTHS]
    overheads = {len(ids) - length for ids, length in zip(tokenizer.encode(trials), TRIAL_LENGTHS)}
    return Pieces(kept, overheads.pop()) if len(overheads) == 1 else None
