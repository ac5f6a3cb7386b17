"""Tool calls as a grammar: what a model must write to call one of these functions, in the wire format of its family. Pure.

Arguments follow the function's schema. Where that says what no grammar can keep to, a function that is `strict` is refused by keyword, and
another one gets any JSON object. Raises `GrammarError`. Called by the chat route.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from radixpd.core.request import Grammar
from radixpd.grammar.charset import literal
from radixpd.grammar.errors import GrammarError
from radixpd.grammar.requests import Tag, Tags
from radixpd.grammar.rules import Rules
from radixpd.grammar.schema import schema_rule

__all__ = ["Function", "Wire", "calls", "calls_or", "marked_calls"]

ANY_OBJECT: dict[str, Any] = {"type": "object"}
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Wire(Protocol):
    """`text.tool_calls.formats.Wire`."""

    @property
    def opening(self) -> str: ...
    @property
    def before(self) -> str: ...
    @property
    def middle(self) -> str: ...
    @property
    def after(self) -> str: ...
    @property
    def between(self) -> str: ...
    @property
    def closing(self) -> str: ...
    @property
    def trigger(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. `parameters` None: it has none."""

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool


def calls(functions: Sequence[Function], wire: Wire, *, many: bool) -> Grammar:
    """One call, or with `many` one or more, and nothing else."""
    rules = Rules()
    body = _sequence(_choice(functions, wire, rules), wire, many=many)
    return Grammar("ebnf", rules.text(f"{_quoted(wire.opening)} {body} {_quoted(wire.closing)}"))


def calls_or(functions: Sequence[Function], wire: Wire, other: Grammar, *, many: bool) -> Grammar:
    """The same, or a text of another grammar, one made of a schema or a pattern."""
    rules = Rules("c")
    body = _sequence(_choice(functions, wire, rules), wire, many=many)
    root, *lines = other.text.strip().splitlines()
    _, _, document = root.partition("::=")
    whole = rules.text(f"({document.strip()}) | {_quoted(wire.opening)} {body} {_quoted(wire.closing)}")
    known = set(whole.splitlines())  # both may need the same rules of JSON
    return Grammar("ebnf", "\n".join([whole, *(line for line in lines if line not in known)]))


def marked_calls(functions: Sequence[Function], wire: Wire) -> Grammar:
    """Free text in which whatever begins like a call is one."""
    rules = Rules()
    if wire.opening.startswith(wire.trigger):
        body = _sequence(_choice(functions, wire, rules), wire, many=True)
        tag = Tag(wire.trigger, rules.text(f"{_quoted(wire.opening[len(wire.trigger) :])} {body}"), wire.closing)
    else:
        tag = Tag(wire.trigger, rules.text(_choice(functions, wire, rules, skipped=wire.trigger, ended=False)), wire.after)
    return Grammar("tags", json.dumps(asdict(Tags((wire.trigger,), (tag,)))))


def _sequence(call: str, wire: Wire, *, many: bool) -> str:
    return f"({call}) ({_quoted(wire.between)} ({call}))*" if many else f"({call})"


def _choice(functions: Sequence[Function], wire: Wire, rules: Rules, *, skipped: str = "", ended: bool = True) -> str:
    """A call of any of them. `skipped`: the beginning that stands there already; `ended`: with what stands behind the arguments."""
    options = []
    for function in functions:
        head = f"{wire.before}{function.name}{wire.middle}".removeprefix(skipped)
        options.append(f"{literal(head)} {_arguments(function, rules)} {_quoted(wire.after if ended else '')}".strip())
    return rules.add(" | ".join(options))


def _arguments(function: Function, rules: Rules) -> str:
    schema = NO_PARAMETERS if function.parameters is None else {"type": "object", **function.parameters}
    try:
        if schema["type"] != "object":
            raise GrammarError("the parameters of a function are an object")
        # A schema that fails in its middle must leave no half-made rules.
        schema_rule(schema, Rules())
        return schema_rule(schema, rules)
    except (GrammarError, RecursionError) as error:
        if function.strict:
            raise GrammarError(f"the parameters of {function.name}: {str(error) or 'nested too deeply'}") from None
        return rules.use("jsonobject")


def _quoted(text: str) -> str:
    return literal(text) if text else '""'
