"""The llguidance backend: no needs of its own, quick to compile, with limits of its own on what a mask may cost.

It reads Lark, so EBNF is translated. What it compiles cannot leave the process, but the text can, and compiling is a matter of
milliseconds. Opened by `base.open_backend`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from radixpd.core.request import Grammar
from radixpd.grammar.base import Compiled, Matcher, Vocabulary
from radixpd.grammar.errors import GrammarError, first_line
from radixpd.grammar.pattern import STRING_CHAR
from radixpd.grammar.requests import read_tags
from radixpd.grammar.rules import BASE
from radixpd.grammar.thinking import LEXED as LEXED_THOUGHT
from radixpd.grammar.thinking import THOUGHT

__all__ = ["build"]

# The rules of a string as one that a lexer can take whole: one parser step for each string instead of one for each character.
STRING = "\n".join(f"{name} ::= {BASE[name]}" for name in ("jsonstring", "jsonrest"))
LEXED = f'jsonstring ::= "\\"" ({STRING_CHAR} | "\\\\" jsonescape)* "\\""'
SURROGATES = r"\ud800-\udfff"  # which this library does not take for characters in the first place


def build(vocabulary: Vocabulary) -> LLGuidance:
    """The backend over a vocabulary."""
    return LLGuidance(vocabulary)


class _Tokens:
    """The vocabulary as llguidance reads it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        rest = vocabulary.size - len(vocabulary.tokens)
        self.tokens = [token or b"\xff<%d>" % id for id, token in enumerate([*vocabulary.tokens[: vocabulary.size], *[b""] * rest])]
        self.special_token_ids = [id for id in range(vocabulary.size) if id >= len(vocabulary.tokens) or not vocabulary.tokens[id]]
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self._bytes = {token: id for id, token in enumerate(vocabulary.tokens) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        """Only for messages: our own tokens are forced, see `jump`."""
        return [self._bytes.get(bytes([byte]), 0) for byte in text]


class LLGuidance:
    """See `Backend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        wrapper = llguidance.TokenizerWrapper(_Tokens(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_ids))
        self._eos_ids = frozenset(vocabulary.eos_ids)

    def compile(self, grammar: Grammar) -> Compiled:
        """See `Backend`."""
        return self._open(_tags(grammar) if grammar.kind == "tags" else llguidance.LLMatcher.grammar_from_lark(_lark(grammar.text)))

    def pack(self, compiled: Compiled) -> bytes:
        """See `Backend`."""
        assert isinstance(compiled, _Compiled)
        return compiled.text.encode()

    def unpack(self, packed: bytes) -> Compiled:
        """See `Backend`."""
        return self._open(packed.decode())

    def _open(self, text: str) -> Compiled:
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise GrammarError(_reason(matcher))
        return _Compiled(text, matcher, self._eos_ids)


class _Compiled:
    def __init__(self, text: str, prototype: Any, eos_ids: frozenset[int]) -> None:
        self.text = text
        self.size = 20 * len(text)  # it does not tell; about what was seen
        self._prototype = prototype
        self._eos_ids = eos_ids

    def matcher(self) -> Matcher:
        return _Matcher(self._prototype.deep_copy(), self._eos_ids)


class _Matcher:
    def __init__(self, matcher: Any, eos_ids: frozenset[int], *, ended: bool = False) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self.ended = ended

    def mask(self, row: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise GrammarError(_reason(self._matcher))

    def accept(self, token: int) -> bool:
        if self.ended:
            return False
        if token in self._eos_ids:
            self.ended = bool(self._matcher.is_accepting())
            return self.ended
        # Asked first: a wrong token would spoil the matcher for good.
        return self._matcher.validate_tokens([token]) == 1 and bool(self._matcher.consume_token(token))

    def forced(self) -> str:
        if self._matcher.is_accepting():
            return ""
        found: bytes = self._matcher.compute_ff_bytes()
        try:
            return found.decode()
        except UnicodeDecodeError as error:  # it begins or ends inside a character
            return found[: error.start].decode()

    def fork(self) -> Matcher:
        return _Matcher(self._matcher.deep_copy(), self._eos_ids, ended=self.ended)


def _reason(matcher: Any) -> str:
    """Why a matcher gave up, for a client."""
    text = str(matcher.get_error()).partition("<state>")[0].strip()
    return "the grammar allows nothing: no text fits it" if text == "NoExtensionBias" else first_line(ValueError(text))


def _lark(ebnf: str) -> str:
    """EBNF as Lark. The translator loses the zeros of long escapes, so they go before it comes."""
    text = ebnf.replace(STRING, LEXED).replace(THOUGHT, LEXED_THOUGHT).replace(SURROGATES, "")
    text = re.sub(r"(?<!\\)((?:\\\\)*)\\u00([0-9a-fA-F]{2})", r"\1\\x\2", text)
    text = re.sub(r"(?<!\\)((?:\\\\)*)\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))", lambda m: m[1] + _char(m[2] or m[3]), text)
    return str(gbnf_to_lark(text))


def _char(digits: str) -> str:
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise GrammarError(f"there is no character {digits}")
    return chr(code)


def _tags(grammar: Grammar) -> str:
    tags = read_tags(grammar)
    structures = [
        llguidance.StructTag(
            trigger=next(trigger for trigger in tags.triggers if tag.begin.startswith(trigger)),
            begin=tag.begin,
            grammar=_lark(tag.ebnf),
            end=tag.end,
        )
        for tag in tags.tags
    ]
    made = llguidance.StructTag.to_grammar(structures, assume_special=False)
    return made if made.startswith("{") else json.dumps({"grammars": [{"lark_grammar": made}]})
