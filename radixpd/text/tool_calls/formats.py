"""The formats by name: SGLang's names, and vLLM's for the same.

A `Format` is how a model's calls are read (`script`) and how a grammar makes it write them (`wire`). Invariant: what follows a wire is
read back by its script. Called by the chat route; the names are the choices of --tool-call-parser.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from radixpd.text.tool_calls import deepseek, hermes, json_list, llama3, mistral, pythonic
from radixpd.text.tool_calls.reader import Reader, Script

__all__ = ["FORMATS", "JSON_LIST", "NAMES", "Format", "Wire"]


@dataclass(frozen=True, slots=True)
class Wire:
    """The text around calls: `opening`, calls with `between` them, `closing`; a call is `before`, the function's name, `middle`, the
    arguments, `after`. Where a model may or may not call, what begins with `trigger` is a call."""

    opening: str
    before: str
    middle: str
    after: str
    between: str
    closing: str
    trigger: str


@dataclass(frozen=True, slots=True)
class Format:
    """One format. `wire` None: no grammar writes it; `id_length`: characters of a call's id, where templates insist on it."""

    script: Script
    wire: Wire | None
    id_length: int | None = None

    def reader(self, names: Collection[str]) -> Reader:
        """A parser of one output, for calls of these functions."""
        return Reader(self.script, names)


def _deepseek(before: str, middle: str, after: str, *, between: str) -> Wire:
    return Wire(
        opening=deepseek.ALL_BEGIN,
        before=deepseek.CALL_BEGIN + before,
        middle=middle,
        after=after + deepseek.CALL_END,
        between=between,
        closing=deepseek.ALL_END,
        trigger=deepseek.ALL_BEGIN,
    )


_LIST = Wire("[", '{"name": "', '", "arguments": ', "}", ", ", "]", "[")
_HERMES = Wire("", hermes.BEGIN + '\n{"name": "', '", "arguments": ', "}\n" + hermes.END_MARK, "\n", "", hermes.BEGIN)
_MISTRAL = Wire(mistral.BEGIN + "[", '{"name": "', '", "arguments": ', "}", ", ", "]", mistral.BEGIN)
_LLAMA3 = Wire("", '{"name": "', '", "parameters": ', "}", "; ", "", '{"name": "')

JSON_LIST = Format(json_list.script, _LIST)
FORMATS = {
    "llama3": Format(llama3.script, _LLAMA3),
    "qwen25": Format(hermes.script, _HERMES),
    "mistral": Format(mistral.script, _MISTRAL, id_length=9),
    "pythonic": Format(pythonic.script, None),
    "deepseekv3": Format(deepseek.script, _deepseek("function" + deepseek.SEPARATOR, "\n```json\n", "\n```", between="\n")),
    "deepseekv31": Format(deepseek.script, _deepseek("", deepseek.SEPARATOR, "", between="")),
}
ALIASES = {
    "qwen": "qwen25", "hermes": "qwen25", "llama3_json": "llama3", "llama4_pythonic": "pythonic", "deepseek_v3": "deepseekv3",
    "deepseek_v31": "deepseekv31",
}  # fmt: skip
FORMATS |= {alias: FORMATS[name] for alias, name in ALIASES.items()}
NAMES = tuple(FORMATS)
