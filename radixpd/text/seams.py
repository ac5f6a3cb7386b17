"""Where a text may be cut so that the ids of the pieces, joined, are the ids of the whole; and a memory of pieces.

Byte-level BPE first cuts a text into words by a pattern that reads from left to right and never looks back, and merges within words only.
With the patterns known here a word always ends between a letter or digit (ASCII) and a space or line break. Cut there, both sides are read
as before: what comes before the seam has seen all that it looks at, what comes after begins as it would. Invariant: `has_seams` is true
only where this holds for certain; any other tokenizer gets whole texts. Called by the tokenizers and by the load balancer, which sees the
same long beginnings again and again.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer as Library
from tokenizers import models

if TYPE_CHECKING:
    from radixpd.text.tokenizer import Tokenizer

__all__ = ["Cut", "PieceMemory", "has_seams", "pieces"]

SEAM = re.compile(r"[A-Za-z0-9][ \n]")
STRIDE = 256  # characters that a piece has at least, but for the last
ENTRY_BYTES = 300  # of a piece beside its text and ids
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = frozenset((LLAMA3, LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")))  # the second is Qwen's


def pieces(text: str) -> list[str]:
    """The text, cut at the first seam after every `STRIDE` characters: texts that begin alike have the same first pieces."""
    found, at = [], 0
    while len(text) - at > STRIDE and (seam := SEAM.search(text, at + STRIDE)) is not None:
        end = seam.start() + 1
        found.append(text[at:end])
        at = end
    found.append(text[at:])
    return found


def has_seams(library: Library) -> bool:
    """Whether a tokenizer is of the kind that the module describes."""
    model = library.model
    if not isinstance(model, models.BPE) or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if any(step["type"] != "NFC" for step in _steps(library.normalizer, "normalizers")):  # NFC joins nothing over a space
        return False
    if any(step["type"] not in ("ByteLevel", "TemplateProcessing") for step in _steps(library.post_processor, "processors")):
        return False
    # A token that is found in the raw text must neither lie across a seam nor swallow the space behind it.
    for token in library.get_added_tokens_decoder().values():
        if SEAM.search(token.content) or (token.rstrip and re.search(r"[A-Za-z0-9]$", token.content)):
            return False
    return _cuts_words(_steps(library.pre_tokenizer, "pretokenizers"))


def _cuts_words(steps: list[dict[str, Any]]) -> bool:
    """Digits alone, then the pattern of GPT-2 (in ByteLevel) or one of `PATTERNS`."""
    last = steps.pop() if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return False
    words = bool(last.get("use_regex", True))
    for step in steps:
        match step:
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} if pattern in PATTERNS:
                words = True
            case {"type": "Digits"}:
                pass
            case _:
                return False
    return words


def _steps(part: Any, many: str) -> list[dict[str, Any]]:
    """A normalizer, pre-tokenizer or post-processor as its steps."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return list(state[many]) if state["type"] == "Sequence" else [state]


@dataclass(frozen=True, slots=True)
class Cut:
    """A text in pieces. `ids`: of each, None where they are not known; `unknown`: characters of those."""

    pieces: list[str]
    ids: list[np.ndarray | None]
    unknown: int


class PieceMemory:
    """Ids of pieces seen before, the least recently used forgotten first; never more than `cap_bytes`.

    For a text: `cut` it, let `work` compute what is unknown (in a thread, if that is much: it touches nothing), then `join`.
    """

    def __init__(self, tokenizer: Tokenizer, cap_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._cap = cap_bytes
        self._known: OrderedDict[str, np.ndarray] = OrderedDict()
        self.size = 0  # bytes
        self._before, self._after = self._ends()

    def cut(self, text: str) -> Cut:
        """What is known of a text."""
        found = pieces(text) if self._tokenizer.has_seams else [text]
        ids = [self._known.get(piece) for piece in found]
        return Cut(found, ids, sum(len(piece) for piece, known in zip(found, ids) if known is None))

    def work(self, cut: Cut) -> list[np.ndarray]:
        """Ids of the unknown pieces."""
        return [self._tokenizer.encode(piece, special=False) for piece, known in zip(cut.pieces, cut.ids) if known is None]

    def join(self, cut: Cut, computed: list[np.ndarray], *, special: bool) -> np.ndarray:
        """Ids of the text, as `Tokenizer.encode` gives them."""
        new = iter(computed)
        ids = [next(new) if known is None else known for known in cut.ids]
        for piece, known in zip(cut.pieces, ids):
            self._keep(piece, known)
        return np.concatenate([self._before, *ids, self._after] if special else ids)

    def _keep(self, piece: str, ids: np.ndarray) -> None:
        if piece in self._known:
            self._known.move_to_end(piece)
            return
        size = _size(piece, ids)
        if size > self._cap // 8:
            return
        self._known[piece] = ids
        self.size += size
        while self.size > self._cap:
            self.size -= _size(*self._known.popitem(last=False))

    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        """What this tokenizer puts around a text."""
        bare, framed = (self._tokenizer.encode("a", special=special) for special in (False, True))
        for at in range(len(framed) - len(bare) + 1):
            if np.array_equal(framed[at : at + len(bare)], bare):
                return framed[:at], framed[at + len(bare) :]
        raise ValueError("the tokenizer changes a text that it adds special tokens to")


def _size(piece: str, ids: np.ndarray) -> int:
    return 4 * len(piece) + ids.nbytes + ENTRY_BYTES
