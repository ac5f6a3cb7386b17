"""JSON schemas as EBNF. Pure. Raises `GrammarError` with the keyword and where it stands. Called by `requests`.

Invariant: every document of the grammar is valid JSON and validates; keywords that cannot be kept to are refused by name, never ignored.
The other way round, the grammar is smaller than the schema where that makes documents better or masks cheaper: properties come in the
schema's order, white space is one space behind each comma and colon, objects with `properties` get no others unless
`additionalProperties` says so, numbers have a bounded number of digits, and strings of bounded length or with a pattern hold no escapes
beyond those that the pattern names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixpd.grammar.charset import literal
from radixpd.grammar.disjoint import check_disjoint
from radixpd.grammar.errors import GrammarError
from radixpd.grammar.keywords import SUPPORTED, as_list, as_mapping, bounds, is_kind, same, spelled, types_of
from radixpd.grammar.members import members, other_key
from radixpd.grammar.merge import ANNOTATIONS, flat
from radixpd.grammar.rules import Rules, repeated, some, times
from radixpd.grammar.scalars import inside, number, string

__all__ = ["schema_ebnf", "schema_rule"]

DEEPEST = 64


def schema_ebnf(schema: Any) -> str:
    """The grammar of one schema."""
    return _Builder(schema, Rules()).grammar()


def schema_rule(schema: Any, rules: Rules) -> str:
    """The name of a rule for its documents, in a grammar that has others too."""
    return rules.add(_Builder(schema, rules).root())


class _Builder:
    """Rules so far. `path` in messages is a JSON pointer into the schema."""

    def __init__(self, root: Any, rules: Rules) -> None:
        self._root = root
        self._rules = rules
        self._by_ref: dict[str, str] = {}

    def grammar(self) -> str:
        return self._rules.text(self.root())

    def root(self) -> str:
        """The body of the rule for whole documents."""
        return self._node(self._root, "", 0)

    # ---- rules ----------------------------------------------------------------------------------------------------------------

    def _ref(self, ref: str, path: str, depth: int) -> str:
        if ref not in self._by_ref:
            name = self._by_ref[ref] = self._rules.reserve()  # the schema may refer to itself
            self._rules.fill(name, self._node(self._target(ref, path), ref, depth + 1))
        return self._by_ref[ref]

    def _target(self, ref: str, path: str) -> Any:
        if ref != "#" and not ref.startswith("#/"):
            raise GrammarError(f"$ref at {path or '/'}: only references into the same schema (#/...) are offered")
        node = self._root
        for part in ref.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                node = node[int(part)]
            else:
                raise GrammarError(f"$ref at {path or '/'}: there is no {ref}")
        return node

    # ---- one schema -----------------------------------------------------------------------------------------------------------

    def _node(self, schema: Any, path: str, depth: int) -> str:
        """The body of a rule."""
        if depth > DEEPEST:
            raise GrammarError(f"a schema may be nested {DEEPEST} deep")
        if schema is True or schema == {}:
            return self._rules.use("jsonvalue")
        if not isinstance(schema, dict):
            raise GrammarError(f"{path or '/'}: {'false allows nothing' if schema is False else 'a schema must be an object or true'}")
        unknown = [key for key in schema if key not in SUPPORTED and key not in ANNOTATIONS]
        if unknown:
            raise GrammarError(f"the keyword {str(unknown[0])[:60]!r} at {path or '/'} is not supported")
        schema = flat(schema, path, self._target)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._choice(schema, key, path, depth)
        if "$ref" in schema:
            if not isinstance(schema["$ref"], str):
                raise GrammarError(f"$ref at {path or '/'} must be a text")
            return self._ref(schema["$ref"], path, depth)
        if "const" in schema or "enum" in schema:
            return self._values(schema, path)
        return " | ".join(f"({self._of_type(kind, schema, path, depth)})" for kind in types_of(schema, path))

    def _choice(self, schema: Mapping[str, Any], key: str, path: str, depth: int) -> str:
        options = as_list(schema[key], f"{path}/{key}")
        if not options:
            raise GrammarError(f"{key} at {path or '/'} must not be empty")
        if key == "oneOf" and len(options) > 1:
            check_disjoint(options, path, self._target)
        return " | ".join(f"({self._node(option, f'{path}/{key}/{index}', depth + 1)})" for index, option in enumerate(options))

    def _values(self, schema: Mapping[str, Any], path: str) -> str:
        values = as_list(schema["enum"], f"{path}/enum") if "enum" in schema else [schema["const"]]
        if "enum" in schema and "const" in schema:
            values = [value for value in values if same(value, schema["const"])]
        if "type" in schema:
            kinds = types_of(schema, path)
            values = [value for value in values if any(is_kind(kind, value) for kind in kinds)]
        others = [key for key in schema if key in SUPPORTED and key not in ("enum", "const", "type", "$defs", "definitions")]
        if others:
            raise GrammarError(f"{others[0]} beside enum or const at {path or '/'} is not supported")
        if not values:
            raise GrammarError(f"enum at {path or '/'} leaves no value")
        return " | ".join(dict.fromkeys(literal(spelled(value)) for value in values))

    def _of_type(self, kind: str, schema: Mapping[str, Any], path: str, depth: int) -> str:
        match kind:
            case "string":
                return string(self._rules, schema, path)
            case "number" | "integer":
                return number(self._rules, schema, path, whole=kind == "integer")
            case "boolean":
                return '"true" | "false"'
            case "null":
                return '"null"'
            case "array":
                return self._array(schema, path, depth)
        return self._object(schema, path, depth)

    # ---- arrays ---------------------------------------------------------------------------------------------------------------

    def _array(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        if schema.get("uniqueItems"):
            raise GrammarError(f"the keyword 'uniqueItems' at {path or '/'} is not supported")
        least, most = bounds(schema, "minItems", "maxItems", path)
        heads, rest = schema.get("prefixItems"), schema.get("items", True)
        if isinstance(rest, list):  # as in draft 7
            if heads is not None:
                raise GrammarError(f"prefixItems beside a list of items at {path or '/'} is not supported")
            heads, rest = rest, schema.get("additionalItems", True)
        heads = as_list(heads if heads is not None else [], f"{path}/prefixItems")
        firsts = [self._rules.add(self._node(each, f"{path}/prefixItems/{index}", depth + 1)) for index, each in enumerate(heads)]
        if rest is False or (most is not None and most <= len(firsts)):
            most = len(firsts) if most is None else min(most, len(firsts))
            if least > most:
                raise GrammarError(f"minItems at {path or '/'} is more than there can be")
            return f'"[" {some(firsts[:most], least)} "]"'
        item = self._rules.add(self._node(rest, f"{path}/items", depth + 1))
        if not firsts:
            return f'"[" {repeated(item, least, most)} "]"'
        more = f'(", " {item})' + times(max(0, least - len(firsts)), None if most is None else most - len(firsts))
        return f'"[" {some(firsts, least, more)} "]"'

    # ---- objects --------------------------------------------------------------------------------------------------------------

    def _object(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        properties = as_mapping(schema.get("properties"), f"{path}/properties")
        required = as_list(schema.get("required") or [], f"{path}/required")
        if not all(isinstance(name, str) for name in required):
            raise GrammarError(f"required at {path or '/'} must hold texts")
        if not properties and not required:
            return self._map(schema, path, depth)
        for key in ("patternProperties", "propertyNames"):
            if key in schema:
                raise GrammarError(f"{key} beside properties or required at {path or '/'} is not supported")
        extra = schema.get("additionalProperties", False)
        if schema.get("additionalProperties") is False and (missing := [name for name in required if name not in properties]):
            raise GrammarError(f"required at {path or '/'} names {missing[0][:60]!r}, which additionalProperties: false forbids")
        least, most = bounds(schema, "minProperties", "maxProperties", path)
        properties = {**properties, **{name: True if extra is False else extra for name in required if name not in properties}}
        if least > len(set(required)) or (most is not None and (most < len(properties) or extra is not False)):
            raise GrammarError(f"minProperties or maxProperties beside properties at {path or '/'} is not supported")
        parts = []
        for name, each in properties.items():
            value = self._node(each, f"{path}/properties/{name}", depth + 1)
            parts.append((self._rules.add(f"{literal(spelled(name) + ': ')} ({value})"), name in required))
        tail = ""
        if extra is not False:
            value = self._rules.add(self._node(extra, f"{path}/additionalProperties", depth + 1))
            pair = self._rules.add(f'"\\"" {other_key(self._rules, list(properties), path)} ": " {value}')
            tail = f'(", " {pair})*'
        return f'"{{" {members(self._rules, parts, tail)} "}}"'

    def _map(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        """An object without named properties."""
        patterns = as_mapping(schema.get("patternProperties"), f"{path}/patternProperties")
        extra, names = schema.get("additionalProperties", True), schema.get("propertyNames")
        least, most = bounds(schema, "minProperties", "maxProperties", path)
        if least > 1:
            raise GrammarError(f"minProperties above 1 at {path or '/'} is not supported without as many required properties")
        if len(patterns) > 1 or (patterns and (names is not None or schema.get("additionalProperties") not in (None, False))):
            raise GrammarError(f"patternProperties at {path or '/'} is supported alone, with one pattern")
        if patterns:
            ((source, value),) = patterns.items()
            key = '"\\"" ' + inside({"pattern": source}, f"{path}/patternProperties") + ' "\\""'
        elif extra is False:
            if least:
                raise GrammarError(f"minProperties at {path or '/'} is more than there can be")
            return '"{}"'
        else:
            value, key = extra, '"\\"" ' + self._rules.use("jsonkeyrest")
        if names is not None:
            if not isinstance(names, dict) or not names.keys() <= {"type", "pattern", "minLength", "maxLength", *ANNOTATIONS}:
                raise GrammarError(f"propertyNames at {path or '/'} is supported with pattern, or minLength and maxLength")
            if "pattern" in names and len(names.keys() & {"minLength", "maxLength"}):
                raise GrammarError(f"pattern together with a length at {path}/propertyNames is not supported")
            key = '"\\"" ' + inside(names, f"{path}/propertyNames") + ' "\\""'
        inner = self._node(value, f"{path}/additionalProperties", depth + 1)
        pair = self._rules.add(f'{key} ": " ({inner})')
        return f'"{{" {repeated(pair, least, most)} "}}"'
