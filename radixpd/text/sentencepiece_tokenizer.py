"""A tokenizer from a SentencePiece `tokenizer.model` alone.

SentencePiece does not read special tokens in text, so the text is cut at them first, and each stretch between is encoded as a text of its
own (with the leading space that the model's own settings ask for), as the original implementations do. Built by `load_tokenizer`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from radixpd.errors import BadRequest, ConfigError
from radixpd.text.stream import ByteStream, TokenStream, decode_bytes
from radixpd.text.tokenizer import known_ids
from radixpd.text.tokenizer_config import TokenizerConfig

__all__ = ["SentencePieceTokenizer"]

SPACE = "\u2581"  # how SentencePiece spells a space


class SentencePieceTokenizer:
    """See the module and `Tokenizer`. Added tokens (beyond the model file) come from the JSON files beside it."""

    has_seams = False  # merges go over the whole text

    def __init__(self, path: Path, config: TokenizerConfig, model_eos: tuple[int, ...]) -> None:
        self._model = _load(path)
        size = self._model.vocab_size()
        self._added = {token.id: token.content for token in config.added if token.id >= size}
        self.vocab_size = max([size - 1, *self._added]) + 1
        self.longest_token = max(map(len, [*map(self._model.id_to_piece, range(size)), *self._added.values()]))
        controls = [id for id in range(size) if self._model.is_control(id) or self._model.is_unknown(id)]
        extra = {token.id for token in config.added if token.special}
        self.special_ids = frozenset([*controls, *extra])
        self.bos_id = self._named(config, "bos_token", self._model.bos_id())
        eos = self._named(config, "eos_token", self._model.eos_id())
        self.eos_ids = tuple(dict.fromkeys([*model_eos, *([] if eos is None else [eos])]))
        self._before = [self.bos_id] if config.add_bos is not False and self.bos_id is not None else []
        self._after = [eos] if config.add_eos and eos is not None else []
        self._strip = self._adds_space()
        spelt = {self._model.id_to_piece(id): id for id in controls} | {text: id for id, text in self._added.items()}
        self._spelt = spelt
        self._cut = re.compile("(" + "|".join(re.escape(text) for text in sorted(spelt, key=len, reverse=True)) + ")")

    def encode(self, text: str, *, special: bool = True) -> np.ndarray:
        ids: list[int] = list(self._before) if special else []
        for part in self._cut.split(text):
            id = self._spelt.get(part)
            if id is not None:
                ids.append(id)
            elif part:
                ids += self._encode_part(part)
        return np.asarray([*ids, *self._after] if special else ids, dtype=np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
        pieces = self._pieces(skip_special)
        return decode_bytes([pieces(id) for id in known_ids(ids, self.vocab_size)], strip=self._strip)

    def token_text(self, id: int) -> str:
        return self.token_bytes(id).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        if not 0 <= id < self.vocab_size:
            return b""
        if id in self._added or id >= self._model.vocab_size():
            return self._added.get(id, "").encode()
        piece: str = self._model.id_to_piece(id)
        if self._model.is_byte(id):
            return bytes([int(piece[3:5], 16)])  # <0xNN>
        return piece.replace(SPACE, " ").encode()

    def stream(self, context: Sequence[int] | np.ndarray = (), *, skip_special: bool = True) -> TokenStream:
        return ByteStream(self._pieces(skip_special), context=context, strip=self._strip)

    def _pieces(self, skip_special: bool) -> Callable[[int], bytes]:
        if not skip_special:
            return self.token_bytes
        return lambda id: b"" if id in self.special_ids else self.token_bytes(id)

    def _named(self, config: TokenizerConfig, name: str, own: int) -> int | None:
        """The id of a named special token: by the JSON files, else by the model itself (-1 = none)."""
        text = config.named.get(name)
        for id, content in self._added.items():
            if content == text:
                return id
        if text is not None:
            id = self._model.piece_to_id(text)
            if id != self._model.unk_id() or text == self._model.id_to_piece(id):
                return int(id)
        return own if own >= 0 else None

    def _encode_part(self, part: str) -> list[int]:
        try:
            return list(self._model.encode(part))
        except RuntimeError as error:  # what the library says to a lone surrogate
            raise BadRequest("the text is not valid Unicode: it holds half of a surrogate pair", param="text") from error

    def _adds_space(self) -> bool:
        """Whether this model puts a space before every text (its `add_dummy_prefix`)."""
        pieces = self._model.encode("a", out_type=str)
        return bool(pieces) and str(pieces[0]).startswith(SPACE)


def _load(path: Path) -> sentencepiece.SentencePieceProcessor:
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{path} is not a SentencePiece model ({error}); see --model-path and --tokenizer-path") from error
