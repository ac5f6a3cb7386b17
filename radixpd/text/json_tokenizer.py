"""A tokenizer from tokenizer.json, encoded by the `tokenizers` library.

Decoding is our own where tokens stand for bytes (`ByteRule`): the library's stream has no flush, and one invalid byte repeated makes it
look back ever further. Other decoders go through the library with a bounded window. Built by `load_tokenizer`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from radixpd.errors import BadRequest, ConfigError
from radixpd.text.seams import has_seams
from radixpd.text.stream import ByteStream, TokenStream, WindowStream, decode_bytes
from radixpd.text.tokenizer import known_ids
from radixpd.text.tokenizer_config import TokenizerConfig

__all__ = ["ByteRule", "JsonTokenizer", "byte_rule"]

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts are encoded one by one: threads of the library would only add waits


@dataclass(frozen=True, slots=True)
class ByteRule:
    """How a token's spelling becomes bytes: by the byte-level alphabet, or by replacements and `<0xNN>` pieces."""

    byte_level: bool = False
    byte_fallback: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    strip: bool = False

    def to_bytes(self, piece: str) -> bytes:
        if self.byte_level:
            try:
                return bytes(BYTE_OF[char] for char in piece)
            except KeyError:  # an added token, spelt in plain text
                return piece.encode()
        for old, new in self.replace:
            piece = piece.replace(old, new)
        if self.byte_fallback and (match := BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return piece.encode()


def byte_alphabet() -> dict[str, int]:
    """The byte-level BPE alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF = byte_alphabet()


def byte_rule(decoder: dict[str, Any] | None) -> ByteRule | None:
    """The rule that a tokenizer.json `decoder` amounts to; None when it is not of the byte kind."""
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteRule(byte_level=True)
    if not kinds or kinds[0] != "Replace" or "Fuse" not in kinds:
        return None
    replace: list[tuple[str, str]] = []
    strip = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replace.append((old, new))
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                strip = True
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                return None
    return ByteRule(byte_fallback="ByteFallback" in kinds, replace=tuple(replace), strip=strip)


class JsonTokenizer:
    """See the module and `Tokenizer`. Token bytes are looked up once per id and kept."""

    def __init__(self, path: Path, config: TokenizerConfig, model_eos: tuple[int, ...]) -> None:
        self._tokenizer = _load(path, config)
        self._rule = byte_rule(_decoder_state(self._tokenizer))
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.longest_token = max(map(len, vocab), default=1)  # byte-level pieces spell a byte as a character: never too short
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.bos_id = vocab.get(config.named.get("bos_token", ""))
        eos = vocab.get(config.named.get("eos_token", ""))
        self.eos_ids = tuple(dict.fromkeys([*model_eos, *([] if eos is None else [eos])]))
        self._before, self._after = self._missing_ends(config, eos)
        self.has_seams = has_seams(self._tokenizer)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, special: bool = True) -> np.ndarray:
        try:
            # Of the library's ways the quickest (it leaves out where tokens lie), and one that lets other threads run.
            ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except TypeError as error:  # what the library says to a lone surrogate
            raise BadRequest("the text is not valid Unicode: it holds half of a surrogate pair", param="text") from error
        if special and (self._before or self._after):
            ids = [*self._before, *ids, *self._after]
        return np.asarray(ids, dtype=np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
        listed = known_ids(ids, self.vocab_size)
        if self._rule is None:
            return str(self._tokenizer.decode(listed, skip_special_tokens=skip_special))
        pieces = self._pieces(skip_special)
        return decode_bytes([pieces(id) for id in listed], strip=self._rule.strip)

    def token_text(self, id: int) -> str:
        return self.token_bytes(id).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        piece = self._bytes.get(id)
        if piece is None:
            piece = self._bytes[id] = self._look_up(id)
        return piece

    def stream(self, context: Sequence[int] | np.ndarray = (), *, skip_special: bool = True) -> TokenStream:
        if self._rule is not None:
            return ByteStream(self._pieces(skip_special), context=context, strip=self._rule.strip)
        return WindowStream(
            lambda ids: str(self._tokenizer.decode(ids, skip_special_tokens=skip_special)),
            lambda id: 0 <= id < self.vocab_size and not (skip_special and id in self.special_ids),
            context=context,
        )

    def _pieces(self, skip_special: bool) -> Callable[[int], bytes]:
        if not skip_special:
            return self.token_bytes
        special, token_bytes = self.special_ids, self.token_bytes
        return lambda id: b"" if id in special else token_bytes(id)

    def _look_up(self, id: int) -> bytes:
        if not 0 <= id < self.vocab_size:
            return b""
        if self._rule is None:
            return str(self._tokenizer.decode([id], skip_special_tokens=False)).encode()
        piece = self._tokenizer.id_to_token(id)
        return b"" if piece is None else self._rule.to_bytes(piece)

    def _missing_ends(self, config: TokenizerConfig, eos: int | None) -> tuple[list[int], list[int]]:
        """Bos and eos that tokenizer_config.json asks for and the post-processor of tokenizer.json does not add."""
        frame = self._tokenizer.encode("", add_special_tokens=True).ids
        before = [self.bos_id] if config.add_bos and self.bos_id is not None and self.bos_id not in frame[:1] else []
        after = [eos] if config.add_eos and eos is not None and eos not in frame[-1:] else []
        return before, after


def _load(path: Path, config: TokenizerConfig) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a tokenizer ({error}); see --model-path and --tokenizer-path") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for token in config.added:
        if tokenizer.token_to_id(token.content) is None:
            tokenizer.add_tokens([AddedToken(token.content, special=token.special, normalized=False)])
    _mark_special(tokenizer, {*config.named.values(), *config.extra_special, *(token.content for token in config.added if token.special)})
    return tokenizer


def _mark_special(tokenizer: Tokenizer, texts: set[str]) -> None:
    """Tokens that the config files call special are special, whatever tokenizer.json says; their other properties stay."""
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for text in sorted(texts):
        known = added.get(text)
        if tokenizer.token_to_id(text) is None or (known is not None and known.special):
            continue
        if known is None:
            known = AddedToken(text, normalized=False)
        known.special = True
        tokenizer.add_special_tokens([known])


def _decoder_state(tokenizer: Tokenizer) -> dict[str, Any] | None:
    state = None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    return state if isinstance(state, dict) else None
