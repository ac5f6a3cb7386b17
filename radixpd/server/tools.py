"""The tools of a chat: which functions may be called, whether one must be, and what follows for grammar and parser.

`required` and a named function are kept to by a grammar, in the wire format of --tool-call-parser or, without one, as a JSON list; `auto`
leaves text free (unless a function is `strict`: then its calls are kept to its schema) and needs the parser. Called by the chat route.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from radixpd.core.request import Grammar
from radixpd.errors import BadRequest
from radixpd.grammar.errors import GrammarError
from radixpd.grammar.tool_calls import Function, calls, calls_or, marked_calls
from radixpd.server.docs import Schema, or_null
from radixpd.text.tool_calls.formats import FORMATS, JSON_LIST, Format

__all__ = ["TOOLS", "TOOL_CHOICE", "Tools", "tools_of"]

MAX_TOOLS = 128
MAX_SCHEMAS = 256 * 1024  # characters of all functions, where a grammar is made of them
NAME = r"^[A-Za-z0-9_.:-]{1,128}$"
CHOICES = ("none", "auto", "required")
TOOLS: Schema = or_null(
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "type": {"enum": ["function", None]},
                "function": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "pattern": NAME},
                        "description": {"type": ["string", "null"]},
                        "parameters": {"type": ["object", "null"], "description": "a JSON schema of the arguments"},
                        "strict": {"type": ["boolean", "null"], "description": "calls are kept to the schema also where they are free"},
                    },
                    "required": ["name"],
                },
            },
            "required": ["function"],
        },
        "maxItems": MAX_TOOLS,
        "description": "functions that may be called",
    }
)
TOOL_CHOICE: Schema = or_null(
    {
        "anyOf": [
            {"enum": list(CHOICES)},
            {
                "type": "object",
                "properties": {
                    "type": {"const": "function"},
                    "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
                },
                "required": ["type", "function"],
            },
        ],
        "description": "whether a function is called, and which",
    }
)


@dataclass(frozen=True, slots=True)
class Tools:
    """`functions`: those that may be called; `format`: how calls are read, None where there are none to read; `forced`: the output is
    calls and nothing else; `many`: there may be several."""

    functions: tuple[Function, ...] = ()
    format: Format | None = None
    forced: bool = False
    many: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Of the functions."""
        return tuple(function.name for function in self.functions)

    def grammar(self, given: Grammar | None, *, mixes: bool, served: bool) -> Grammar | None:
        """What the output must be, `given` what the request asks for besides. `mixes`: that can stand beside calls; `served`: whether
        this server has grammars."""
        if self.format is None:
            return given
        wire = self.format.wire
        strict = any(function.strict for function in self.functions)
        if wire is None or not (self.forced or given or strict):
            return given  # without a wire nothing can be kept to
        param, what = ("tool_choice", "tool_choice required") if self.forced else ("tools", "tools with strict: true")
        if not served:
            raise BadRequest(f"{what}: this server keeps to no grammar (--grammar-backend none)", param=param, code="unsupported_field")
        if self.forced and given is not None:
            raise BadRequest(f"{what} and another grammar: an output follows one grammar", param=param)
        if given is not None and not mixes:
            return given
        try:
            source = json.dumps([(each.name, each.parameters, each.strict) for each in self.functions])
            if len(source) > MAX_SCHEMAS:
                raise BadRequest(f"tools: functions that are kept to may have {MAX_SCHEMAS} characters, got {len(source)}", param="tools")
            return _grammar(source, self.format, self.forced, self.many, given)
        except (GrammarError, RecursionError) as error:
            raise BadRequest(f"tools: {error if isinstance(error, GrammarError) else 'nested too deeply'}", param="tools") from None


def tools_of(tools: list[Any] | None, choice: Any, *, many: bool | None, parser: str | None) -> Tools:
    """What a request's fields say. `parser`: --tool-call-parser."""
    functions = _functions(tools or [])
    wanted = _wanted(choice, [function.name for function in functions])
    if not functions or wanted == "none":
        return Tools()
    own = FORMATS[parser] if parser else None
    if wanted == "auto":
        if own is None:
            raise BadRequest(
                "tools: without --tool-call-parser this server cannot tell calls from text; "
                "tool_choice required or a named function work, and none does not call",
                param="tools",
                code="unsupported_field",
            )
        return Tools(functions, own, many=many is not False)
    format = own if own is not None and own.wire is not None else JSON_LIST
    if wanted == "required":
        return Tools(functions, format, forced=True, many=many is not False)
    name = wanted.removeprefix("=")
    return Tools(tuple(function for function in functions if function.name == name), format, forced=True, many=False)


def _functions(tools: list[Any]) -> tuple[Function, ...]:
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"tools may hold at most {MAX_TOOLS} functions, got {len(tools)}", param="tools")
    found: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise BadRequest(f"{where} must be an object", param="tools")
        if tool.get("type") not in (None, "function"):
            raise BadRequest(f"{where}.type must be function, got {str(tool['type'])[:40]!r}", param="tools")
        function = _function(tool.get("function"), f"{where}.function")
        if function.name in found:
            raise BadRequest(f"{where}.function.name: there are two functions {function.name}", param="tools")
        found[function.name] = function
    return tuple(found.values())


def _function(given: Any, where: str) -> Function:
    if not isinstance(given, dict):
        raise BadRequest(f"{where} must be an object with a name", param="tools")
    name = given.get("name")
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise BadRequest(f"{where}.name must have 1 to 128 letters, digits, or _ . : -, got {str(name)[:40]!r}", param="tools")
    kinds: dict[str, type | tuple[type, ...]] = {"description": str, "parameters": dict, "strict": bool}
    for key, kind in kinds.items():
        if given.get(key) is not None and not isinstance(given[key], kind):
            raise BadRequest(f"{where}.{key} has the wrong type: {type(given[key]).__name__}", param="tools")
    return Function(name, given.get("parameters"), given.get("strict") is True)


def _wanted(choice: Any, names: list[str]) -> str:
    """`none`, `auto`, `required`, or `=NAME`."""
    if choice is None:
        return "auto"
    if isinstance(choice, str) and choice in CHOICES:
        if choice == "required" and not names:
            raise BadRequest("tool_choice required needs tools", param="tool_choice")
        return choice
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise BadRequest(
            f'tool_choice must be one of {", ".join(CHOICES)}, or {{"type": "function", "function": {{"name": ...}}}}', param="tool_choice"
        )
    if name not in names:
        raise BadRequest(f"tool_choice names a function that is not among the tools: {name[:60]!r}", param="tool_choice")
    return f"={name}"


@lru_cache(64)
def _grammar(source: str, format: Format, forced: bool, many: bool, given: Grammar | None) -> Grammar:
    functions = [Function(*each) for each in json.loads(source)]
    wire = format.wire
    assert wire is not None
    if forced:
        return calls(functions, wire, many=many)
    return marked_calls(functions, wire) if given is None else calls_or(functions, wire, given, many=many)
