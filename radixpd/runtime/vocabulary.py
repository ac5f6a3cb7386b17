"""The served model's tokens as the grammar library wants them: bytes by id, and the tokenizer's own tokens of a piece of text.

Loaded in the library's thread, when the first grammar is wanted. Called by the runner process.
"""

from __future__ import annotations

from radixpd.config.resolve import Resolved
from radixpd.grammar.base import Vocabulary
from radixpd.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Spelling"]


class Spelling:
    """One model's. `canonical` works from the first call of `vocabulary` on."""

    def __init__(self, resolved: Resolved) -> None:
        self._directories = resolved.tokenizer_directory, resolved.directory
        self._size = resolved.model.vocab_size
        self._eos_ids = tuple(id for id in resolved.eos_ids if id < self._size)
        self._tokens: list[bytes] = []
        self._tokenizer: Tokenizer | None = None

    def vocabulary(self) -> Vocabulary:
        """Read it."""
        tokenizer = load_tokenizer(self._directories[0], model_directory=self._directories[1])
        nothing = tokenizer.special_ids | set(self._eos_ids)
        most = min(tokenizer.vocab_size, self._size)
        self._tokens = [b"" if id in nothing else tokenizer.token_bytes(id) for id in range(most)]
        self._tokenizer = tokenizer
        return Vocabulary(self._tokens, self._size, self._eos_ids)

    def canonical(self, text: str) -> list[int]:
        """The tokens that the tokenizer makes of a text in the middle of another. None where they would spell something else: a tokenizer
        may add a space in front of any text that it is given."""
        assert self._tokenizer is not None
        ids: list[int] = self._tokenizer.encode(text, special=False).tolist()
        spelt = b"".join(self._tokens[id] if id < len(self._tokens) else b"" for id in ids)
        return ids if spelt == text.encode() else []
