"""The xgrammar backend: the default, with the cheapest masks. Importing it imports torch. Opened by `base.open_backend`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import xgrammar

from radixpd.core.request import Grammar
from radixpd.grammar.base import Compiled, Matcher, Vocabulary
from radixpd.grammar.bounds import forces_little
from radixpd.grammar.errors import GrammarError, first_line
from radixpd.grammar.requests import read_tags

__all__ = ["build"]

FORCES, FREE = b"+", b"-"  # first byte of what is packed


def build(vocabulary: Vocabulary) -> XGrammar:
    """The backend over a vocabulary."""
    return XGrammar(vocabulary)


class XGrammar:
    """See `Backend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = [*vocabulary.tokens, *[b""] * (vocabulary.size - len(vocabulary.tokens))]
        self._info = xgrammar.TokenizerInfo(
            tokens[: vocabulary.size],
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.eos_ids),
        )

    def compile(self, grammar: Grammar) -> Compiled:
        """See `Backend`."""
        # A compiler of its own, without a cache: what this process keeps is for `Library` to decide.
        compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        try:
            if grammar.kind == "tags":
                compiled = compiler.compile_structural_tag(_structural_tag(grammar))
            else:
                compiled = compiler.compile_grammar(grammar.text)
        except (RuntimeError, ValueError) as error:
            raise GrammarError(first_line(error)) from None
        return _Compiled(compiled, forces=forces_little(json.loads(compiled.grammar.serialize_json())))

    def pack(self, compiled: Compiled) -> bytes:
        """See `Backend`."""
        assert isinstance(compiled, _Compiled)
        packed: str = compiled.grammar.serialize_json()
        return (FORCES if compiled.forces else FREE) + packed.encode()

    def unpack(self, packed: bytes) -> Compiled:
        """See `Backend`."""
        forces, text = packed[:1] == FORCES, packed[1:].decode()
        return _Compiled(xgrammar.CompiledGrammar.deserialize_json(text, self._info), forces=forces)


class _Compiled:
    """`forces`: what it forces can be looked for."""

    def __init__(self, grammar: Any, *, forces: bool) -> None:
        self.grammar = grammar
        self.forces = forces
        self.size: int = grammar.memory_size_bytes

    def matcher(self) -> Matcher:
        return _Matcher(xgrammar.GrammarMatcher(self.grammar), forces=self.forces)


class _Matcher:
    def __init__(self, matcher: Any, *, forces: bool) -> None:
        self._matcher = matcher
        self._forces = forces

    def mask(self, row: np.ndarray) -> None:
        self._matcher.fill_next_token_bitmask(row.reshape(1, -1), 0)

    def accept(self, token: int) -> bool:
        return not self.ended and bool(self._matcher.accept_token(token))

    def forced(self) -> str:
        return str(self._matcher.find_jump_forward_string()) if self._forces else ""

    def fork(self) -> Matcher:
        return _Matcher(self._matcher.fork(), forces=self._forces)

    @property
    def ended(self) -> bool:
        return bool(self._matcher.is_terminated())


def _structural_tag(grammar: Grammar) -> str | dict[str, Any]:
    tags = read_tags(grammar)
    content = [
        {"type": "tag", "begin": tag.begin, "content": {"type": "grammar", "grammar": tag.ebnf}, "end": tag.end} for tag in tags.tags
    ]
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": list(tags.triggers), "tags": content}}
