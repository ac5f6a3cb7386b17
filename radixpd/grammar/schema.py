"""JSON schemas as EBNF. Pure. Raises `GrammarError` with the keyword and where it stands. Called by `requests`.

Invariant: every document of the grammar is valid JSON and validates; keywords that cannot be kept to are refused by name, never ignored.
The other way round, the grammar is smaller than the schema where that makes documents better or masks cheaper: properties come in the
schema's order, white space is one space behind each comma and colon, objects with `properties` get no others unless
`additionalProperties` says so, numbers have a bounded number of digits, and strings of bounded length or with a pattern hold no escapes
beyond those that the pattern names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from radixpd.grammar.charset import literal, minus, normal, spelt
from radixpd.grammar.errors import GrammarError
from radixpd.grammar.formats import FORMATS
from radixpd.grammar.merge import ANNOTATIONS, flat
from radixpd.grammar.numbers import INTEGER, LONGEST, NUMBER, between, decimals_between
from radixpd.grammar.pattern import MAX_REPEAT, PLAIN, STRING_CHAR, in_string

__all__ = ["SUPPORTED", "schema_ebnf"]

MAX_EBNF = 256 * 1024
DEEPEST = 64
TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
OF_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "array": frozenset(("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems")),
    "object": frozenset(
        ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties")
    ),
}
SUPPORTED = frozenset(("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions")).union(*OF_TYPE.values())
BASE = {
    "jsonstring": '"\\"" jsonrest',
    # Right recursion: with a star instead, masks cost a thousand times as much.
    "jsonrest": f'"\\"" | {STRING_CHAR} jsonrest | "\\\\" jsonescape jsonrest',
    "jsonescape": '["\\\\/bfnrt] | "u" ([0-9a-cA-CefEF] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2})',
    "jsonnumber": NUMBER,
    "jsoninteger": INTEGER,
    "jsonvalue": 'jsonobject | jsonarray | jsonstring | jsonnumber | "true" | "false" | "null"',
    "jsonobject": '"{" (jsonstring ": " jsonvalue (", " jsonstring ": " jsonvalue)*)? "}"',
    "jsonarray": '"[" (jsonvalue (", " jsonvalue)*)? "]"',
    "jsonkeyrest": f'"\\"" | {STRING_CHAR} jsonkeyrest',
}
NEEDS = {
    "jsonstring": ("jsonrest",), "jsonrest": ("jsonescape",), "jsonvalue": ("jsonobject", "jsonarray", "jsonstring", "jsonnumber"),
    "jsonobject": ("jsonvalue",), "jsonarray": ("jsonvalue",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Marks:
    """What the documents of a schema are known to be: their types, their values if these are listed, and those of required properties."""

    kinds: frozenset[str]
    values: frozenset[str] | None = None
    members: Mapping[str, frozenset[str]] = field(default_factory=dict)


def schema_ebnf(schema: Any) -> str:
    """The grammar of one schema."""
    return _Builder(schema).grammar()


class _Builder:
    """Rules so far. `path` in messages is a JSON pointer into the schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._rules: dict[str, str] = {}
        self._by_ref: dict[str, str] = {}
        self._size = 0

    def grammar(self) -> str:
        body = self._node(self._root, "", 0)
        return "\n".join(f"{name} ::= {rule}" for name, rule in {"root": body, **self._rules}.items())

    # ---- rules ----------------------------------------------------------------------------------------------------------------

    def _use(self, name: str) -> str:
        if name not in self._rules:
            self._rules[name] = BASE[name]
            for other in NEEDS.get(name, ()):
                self._use(other)
        return name

    def _rule(self, body: str) -> str:
        """A name for this body."""
        name = f"r{len(self._rules)}"
        self._put(name, body)
        return name

    def _put(self, name: str, body: str) -> None:
        self._size += len(body)
        if self._size > MAX_EBNF:
            raise GrammarError(f"the schema makes a grammar of more than {MAX_EBNF} characters")
        self._rules[name] = body

    def _ref(self, ref: str, path: str, depth: int) -> str:
        if ref not in self._by_ref:
            name = self._by_ref[ref] = f"r{len(self._rules)}"
            self._rules[name] = ""  # taken: the schema may refer to itself
            self._put(name, self._node(self._target(ref, path), ref, depth + 1))
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
            return self._use("jsonvalue")
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
        return " | ".join(f"({self._of_type(kind, schema, path, depth)})" for kind in self._types(schema, path))

    def _choice(self, schema: Mapping[str, Any], key: str, path: str, depth: int) -> str:
        options = _list(schema[key], f"{path}/{key}")
        if not options:
            raise GrammarError(f"{key} at {path or '/'} must not be empty")
        if key == "oneOf" and len(options) > 1:
            self._check_disjoint(options, path)
        return " | ".join(f"({self._node(option, f'{path}/{key}/{index}', depth + 1)})" for index, option in enumerate(options))

    def _check_disjoint(self, options: list[Any], path: str) -> None:
        """`oneOf` means exactly one: a grammar can promise that only where the options cannot overlap."""
        seen = [self._marks(option, path) for option in options]
        for at, one in enumerate(seen):
            if any(_overlap(one, other) for other in seen[at + 1 :]):
                raise GrammarError(f"oneOf at {path or '/'}: its options may overlap, which is not supported; use anyOf")

    def _marks(self, option: Any, path: str) -> Marks:
        """What tells an option's documents from others."""
        if not isinstance(option, dict):
            return Marks(frozenset(TYPES))
        option = flat(option, path, self._target)
        if "$ref" in option:
            target = self._target(option["$ref"], path) if isinstance(option["$ref"], str) else True
            return Marks(frozenset(TYPES)) if isinstance(target, dict) and "$ref" in target else self._marks(target, path)
        if (values := _fixed(option)) is not None:
            return Marks(frozenset(kind for kind in TYPES if any(_is(kind, value) for value in values)), frozenset(map(_json, values)))
        if "anyOf" in option or "oneOf" in option:
            return Marks(frozenset(TYPES))
        kinds = set(self._types(option, path))
        if kinds & {"number", "integer"}:
            kinds |= {"number", "integer"}
        members = {}
        if kinds == {"object"}:
            properties = _mapping(option.get("properties"), f"{path}/properties")
            for name in _list(option.get("required") or [], f"{path}/required"):
                if isinstance(inner := properties.get(name), dict) and (values := _fixed(inner)) is not None:
                    members[name] = frozenset(map(_json, values))
        return Marks(frozenset(kinds), None, members)

    def _values(self, schema: Mapping[str, Any], path: str) -> str:
        values = _list(schema["enum"], f"{path}/enum") if "enum" in schema else [schema["const"]]
        if "enum" in schema and "const" in schema:
            values = [value for value in values if _same(value, schema["const"])]
        if "type" in schema:
            kinds = self._types(schema, path)
            values = [value for value in values if any(_is(kind, value) for kind in kinds)]
        others = [key for key in schema if key in SUPPORTED and key not in ("enum", "const", "type", "$defs", "definitions")]
        if others:
            raise GrammarError(f"{others[0]} beside enum or const at {path or '/'} is not supported")
        if not values:
            raise GrammarError(f"enum at {path or '/'} leaves no value")
        return " | ".join(dict.fromkeys(literal(_json(value)) for value in values))

    def _types(self, schema: Mapping[str, Any], path: str) -> list[str]:
        given = schema.get("type")
        if given is None:
            found = [kind for kind, keys in OF_TYPE.items() if keys & schema.keys()]
            return found or list(TYPES)
        kinds = [given] if isinstance(given, str) else given
        if not isinstance(kinds, list) or not kinds or any(kind not in TYPES for kind in kinds):
            raise GrammarError(f"type at {path or '/'} must be one of {', '.join(TYPES)}, or a list of them")
        if "number" in kinds and "integer" in kinds:
            kinds = [kind for kind in kinds if kind != "integer"]
        return list(dict.fromkeys(kinds))

    def _of_type(self, kind: str, schema: Mapping[str, Any], path: str, depth: int) -> str:
        match kind:
            case "string":
                return self._string(schema, path)
            case "number" | "integer":
                return self._number(schema, path, whole=kind == "integer")
            case "boolean":
                return '"true" | "false"'
            case "null":
                return '"null"'
            case "array":
                return self._array(schema, path, depth)
        return self._object(schema, path, depth)

    # ---- strings and numbers --------------------------------------------------------------------------------------------------

    def _string(self, schema: Mapping[str, Any], path: str) -> str:
        given = [key for key in ("pattern", "format") if key in schema]
        bounded = [key for key in ("minLength", "maxLength") if key in schema]
        if not given and not bounded:
            return self._use("jsonstring")
        if len(given) > 1 or (given and bounded):
            raise GrammarError(f"{given[0]} together with {(given + bounded)[1]} at {path or '/'} is not supported")
        return f'"\\"" {self._inside(schema, path)} "\\""'

    def _inside(self, schema: Mapping[str, Any], path: str) -> str:
        """Between the quotes of a string with a rule."""
        if "format" in schema:
            name = schema["format"]
            if not isinstance(name, str) or name not in FORMATS:
                raise GrammarError(f"format {str(name)[:60]!r} at {path or '/'} is not supported: {', '.join(sorted(FORMATS))} are")
            return f"({in_string(FORMATS[name])})"
        if "pattern" in schema:
            if not isinstance(schema["pattern"], str):
                raise GrammarError(f"pattern at {path or '/'} must be a text")
            try:
                return f"({in_string(schema['pattern'])})"
            except GrammarError as error:
                raise GrammarError(f"pattern at {path or '/'}: {error}") from None
        least, most = _bounds(schema, "minLength", "maxLength", path)
        return STRING_CHAR + _times(least, most)

    def _number(self, schema: Mapping[str, Any], path: str, *, whole: bool) -> str:
        if schema.get("multipleOf", 1) != 1:
            raise GrammarError(f"multipleOf at {path or '/'} is not supported, except 1")
        whole = whole or "multipleOf" in schema
        low, open_low = _limit(schema, "minimum", "exclusiveMinimum", path, max)
        high, open_high = _limit(schema, "maximum", "exclusiveMaximum", path, min)
        if low is None and high is None:
            return self._use("jsoninteger" if whole else "jsonnumber")
        try:
            if not whole:
                return decimals_between(low, high, open_low=open_low, open_high=open_high)
            least = None if low is None else int(low.to_integral_value("ROUND_CEILING"))
            most = None if high is None else int(high.to_integral_value("ROUND_FLOOR"))
            if open_low and least == low:
                least = int(low) + 1 if low is not None else None
            if open_high and most == high:
                most = int(high) - 1 if high is not None else None
            return between(least, most)
        except GrammarError as error:
            raise GrammarError(f"{path or '/'}: {error}") from None

    # ---- arrays ---------------------------------------------------------------------------------------------------------------

    def _array(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        if schema.get("uniqueItems"):
            raise GrammarError(f"the keyword 'uniqueItems' at {path or '/'} is not supported")
        least, most = _bounds(schema, "minItems", "maxItems", path)
        heads, rest = schema.get("prefixItems"), schema.get("items", True)
        if isinstance(rest, list):  # as in draft 7
            if heads is not None:
                raise GrammarError(f"prefixItems beside a list of items at {path or '/'} is not supported")
            heads, rest = rest, schema.get("additionalItems", True)
        heads = _list(heads if heads is not None else [], f"{path}/prefixItems")
        firsts = [self._rule(self._node(each, f"{path}/prefixItems/{index}", depth + 1)) for index, each in enumerate(heads)]
        if rest is False or (most is not None and most <= len(firsts)):
            most = len(firsts) if most is None else min(most, len(firsts))
            if least > most:
                raise GrammarError(f"minItems at {path or '/'} is more than there can be")
            return f'"[" {_some(firsts[:most], least)} "]"'
        item = self._rule(self._node(rest, f"{path}/items", depth + 1))
        if not firsts:
            return f'"[" {_repeated(item, least, most)} "]"'
        more = f'(", " {item})' + _times(max(0, least - len(firsts)), None if most is None else most - len(firsts))
        return f'"[" {_some(firsts, least, more)} "]"'

    # ---- objects --------------------------------------------------------------------------------------------------------------

    def _object(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        properties = _mapping(schema.get("properties"), f"{path}/properties")
        required = _list(schema.get("required") or [], f"{path}/required")
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
        least, most = _bounds(schema, "minProperties", "maxProperties", path)
        properties = {**properties, **{name: True if extra is False else extra for name in required if name not in properties}}
        if least > len(set(required)) or (most is not None and (most < len(properties) or extra is not False)):
            raise GrammarError(f"minProperties or maxProperties beside properties at {path or '/'} is not supported")
        parts = [
            (self._rule(f"{literal(_json(name) + ': ')} ({self._node(each, f'{path}/properties/{name}', depth + 1)})"), name in required)
            for name, each in properties.items()
        ]
        tail = ""
        if extra is not False:
            value = self._rule(self._node(extra, f"{path}/additionalProperties", depth + 1))
            pair = self._rule(f'"\\"" {self._other_key(list(properties), path)} ": " {value}')
            tail = f'(", " {pair})*'
        return f'"{{" {self._members(parts, tail)} "}}"'

    def _members(self, parts: list[tuple[str, bool]], tail: str) -> str:
        """All properties in order, the required ones always; nothing but what is there is separated by commas."""
        following = [tail]  # what may come behind property i, longest last
        for name, required in reversed(parts):
            item = f'", " {name}' if required else f'(", " {name})?'
            following.append(f"{item} {following[-1]}".strip())
        following.reverse()
        first = next((at for at, (_, required) in enumerate(parts) if required), None)
        if first == 0:
            return f"{parts[0][0]} {following[1]}".strip()
        # Named, since each is said twice: behind its own property and behind those that may be missing before it.
        for at in range(len(parts) - 1, 0, -1):
            name, required = parts[at]
            item = f'", " {name}' if required else f'(", " {name})?'
            following[at] = self._rule(f"{item} {following[at + 1]}".strip())
        last = len(parts) if first is None else first + 1
        options = [f"{name} {following[at + 1]}".strip() for at, (name, _) in enumerate(parts[:last])]
        if first is None:
            if tail:
                options.append(tail.removeprefix('(", " ').removesuffix(")*") + " " + tail)
            options.append('""')
        return f"({' | '.join(options)})"

    def _map(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        """An object without named properties."""
        patterns = _mapping(schema.get("patternProperties"), f"{path}/patternProperties")
        extra, names = schema.get("additionalProperties", True), schema.get("propertyNames")
        least, most = _bounds(schema, "minProperties", "maxProperties", path)
        if least > 1:
            raise GrammarError(f"minProperties above 1 at {path or '/'} is not supported without as many required properties")
        if len(patterns) > 1 or (patterns and (names is not None or schema.get("additionalProperties") not in (None, False))):
            raise GrammarError(f"patternProperties at {path or '/'} is supported alone, with one pattern")
        if patterns:
            ((source, value),) = patterns.items()
            key = '"\\"" ' + self._inside({"pattern": source}, f"{path}/patternProperties") + ' "\\""'
        elif extra is False:
            if least:
                raise GrammarError(f"minProperties at {path or '/'} is more than there can be")
            return '"{}"'
        else:
            value, key = extra, '"\\"" ' + self._use("jsonkeyrest")
        if names is not None:
            if not isinstance(names, dict) or not names.keys() <= {"type", "pattern", "minLength", "maxLength", *ANNOTATIONS}:
                raise GrammarError(f"propertyNames at {path or '/'} is supported with pattern, or minLength and maxLength")
            if "pattern" in names and len(names.keys() & {"minLength", "maxLength"}):
                raise GrammarError(f"pattern together with a length at {path}/propertyNames is not supported")
            key = '"\\"" ' + self._inside(names, f"{path}/propertyNames") + ' "\\""'
        inner = self._node(value, f"{path}/additionalProperties", depth + 1)
        pair = self._rule(f'{key} ": " ({inner})')
        return f'"{{" {_repeated(pair, least, most)} "}}"'

    def _other_key(self, names: list[str], path: str) -> str:
        """The rest of a key behind its first quote, of keys that are none of these."""
        if sum(map(len, names)) > 2000:
            raise GrammarError(f"additionalProperties at {path or '/'} is not supported beside so many properties")
        plain = [name for name in names if all(any(low <= ord(char) <= high for low, high in PLAIN) for char in name)]
        return self._key_node(plain)

    def _key_node(self, names: list[str]) -> str:
        """Keys that are none of `names`, from one place on."""
        rest = self._use("jsonkeyrest")
        heads: dict[str, list[str]] = {}
        for name in names:
            if name:
                heads.setdefault(name[0], []).append(name[1:])
        options = [] if "" in names else ['"\\""']
        options += [f"{literal(head)} {self._key_node(tails)}" for head, tails in heads.items()]
        others = minus(PLAIN, normal((ord(head), ord(head)) for head in heads))
        return self._rule(" | ".join([*options, f"{spelt(others)} {rest}"]))


def _overlap(one: Marks, other: Marks) -> bool:
    """Whether a document could be both."""
    if not one.kinds & other.kinds:
        return False
    if one.values is not None and other.values is not None:
        return bool(one.values & other.values)
    return all(values & other.members[name] for name, values in one.members.items() if name in other.members)


def _fixed(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _repeated(item: str, least: int, most: int | None) -> str:
    """`least` to `most` of an item, with commas."""
    if most == 0:
        return '""'
    some = f'{item} (", " {item})' + _times(max(0, least - 1), None if most is None else most - 1)
    return some if least else f"({some})?"


def _some(items: list[str], least: int, more: str = "") -> str:
    """A prefix of these items, of at least `least`; `more` behind all of them."""
    text = more
    for at in range(len(items) - 1, -1, -1):
        item = items[at] if at == 0 else f'", " {items[at]}'
        body = f"{item} {text}".strip()
        text = body if at < least else f"({body})?"
    return text or '""'


def _times(least: int, most: int | None) -> str:
    if most is None:
        return "*" if least == 0 else f"{{{least},}}"
    return f"{{{least},{most}}}"


def _bounds(schema: Mapping[str, Any], low: str, high: str, path: str) -> tuple[int, int | None]:
    found: list[int | None] = []
    for key in (low, high):
        value = schema.get(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_REPEAT):
            raise GrammarError(f"{key} at {path or '/'} must be between 0 and {MAX_REPEAT}")
        found.append(value)
    least, most = found[0] or 0, found[1]
    if most is not None and least > most:
        raise GrammarError(f"{low} at {path or '/'} is more than {high}")
    return least, most


def _limit(
    schema: Mapping[str, Any], closed: str, exclusive: str, path: str, pick: Callable[[Decimal, Decimal], Decimal]
) -> tuple[Decimal | None, bool]:
    """The narrower of two bounds on one side, and whether it is itself left out."""
    found: list[Decimal | None] = []
    for key in (closed, exclusive):
        value = schema.get(key)
        if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool)):
            raise GrammarError(f"{key} at {path or '/'} must be a number")
        if value is not None and abs(value) >= 10**LONGEST:
            raise GrammarError(f"{key} at {path or '/'} may have {LONGEST} digits")
        found.append(None if value is None else Decimal(str(value)))
    inner, outer = found
    if outer is None or inner is None:
        return (inner, False) if outer is None else (outer, True)
    return (inner, False) if inner != outer and pick(inner, outer) == inner else (outer, True)


def _list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise GrammarError(f"{path} must be a list")
    return value


def _mapping(value: Any, path: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise GrammarError(f"{path} must be an object")
    return value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _same(one: Any, other: Any) -> bool:
    return _json(one) == _json(other)


def _is(kind: str, value: Any) -> bool:
    match value:
        case None:
            return kind == "null"
        case bool():
            return kind == "boolean"
        case int():
            return kind in ("integer", "number")
        case float():
            return kind == "number" or (kind == "integer" and value.is_integer())
        case str():
            return kind == "string"
        case list():
            return kind == "array"
    return kind == "object"
