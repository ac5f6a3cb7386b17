"""The tokenizer as the rest of radixpd sees it, and the loader that picks an implementation by the files present.

Invariant: whatever ids come in, the joined pieces of `stream` (an empty context, then `flush`) equal `decode` of those ids. Called by
the tokenizer manager, the offline `LLM` and the load balancer; loads in well under a second, without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from radixpd.errors import ConfigError
from radixpd.text.stream import TokenStream
from radixpd.text.tokenizer_config import eos_ids_of_model, read_tokenizer_config

__all__ = ["TokenStream", "Tokenizer", "known_ids", "load_tokenizer"]


class Tokenizer(Protocol):
    """Text to ids and back. `eos_ids` end an output; `special_ids` are left out of text unless asked for."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def longest_token(self) -> int:
        """Characters of the longest token: n tokens never stand for more than n times as many."""
        ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def has_seams(self) -> bool:
        """Whether the ids of a text are those of its `seams.pieces`, joined."""
        ...

    def encode(self, text: str, *, special: bool = True) -> np.ndarray:
        """int32 ids. `special` adds what this model's own tokenizer adds around a text (bos, eos); special tokens that
        the text spells out are recognised either way."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
        """Text of a whole sequence, as a stream would give it."""
        ...

    def token_text(self, id: int) -> str:
        """One token alone, specials spelt out; "" for ids that the model has and the tokenizer lacks."""
        ...

    def token_bytes(self, id: int) -> bytes:
        """The bytes behind `token_text`: a token may be part of a character."""
        ...

    def stream(self, context: Sequence[int] | np.ndarray = (), *, skip_special: bool = True) -> TokenStream:
        """Incremental text of an output that follows `context`."""
        ...


def known_ids(ids: Sequence[int] | np.ndarray, vocab_size: int) -> list[int]:
    """The ids that the tokenizer has. A model may have more rows than its tokenizer has tokens; those have no text."""
    listed: list[int] = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    return [id for id in listed if 0 <= id < vocab_size]


def load_tokenizer(directory: str | Path, *, model_directory: str | Path | None = None) -> Tokenizer:
    """Load `tokenizer.json`, or else `tokenizer.model`. `model_directory` is where generation_config.json and config.json
    are, when not with the tokenizer."""
    folder = Path(directory)
    config = read_tokenizer_config(folder)
    model_eos = eos_ids_of_model(Path(model_directory) if model_directory is not None else folder)
    if (folder / "tokenizer.json").is_file():
        from radixpd.text.json_tokenizer import JsonTokenizer

        return JsonTokenizer(folder / "tokenizer.json", config, model_eos)
    if (folder / "tokenizer.model").is_file():
        from radixpd.text.sentencepiece_tokenizer import SentencePieceTokenizer

        return SentencePieceTokenizer(folder / "tokenizer.model", config, model_eos)
    raise ConfigError(f"no tokenizer.json and no tokenizer.model in {folder}; give the tokenizer's place with --tokenizer-path")
