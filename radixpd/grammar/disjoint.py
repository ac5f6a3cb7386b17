"""Whether the options of a `oneOf` can overlap. Raises `GrammarError` where they may. Called by `schema`.

A grammar cannot say "exactly one". It need not where the options' documents differ in type, in listed values, or in the values of a
property that both require.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from radixpd.grammar.errors import GrammarError
from radixpd.grammar.keywords import TYPES, as_list, as_mapping, fixed, is_kind, spelled, types_of
from radixpd.grammar.merge import flat

__all__ = ["check_disjoint"]

Target = Callable[[str, str], Any]  # what a $ref, found at a path, refers to


def check_disjoint(options: list[Any], path: str, target: Target) -> None:
    """`oneOf` means exactly one: a grammar can promise that only where the options cannot overlap."""
    seen = [_marks(option, path, target) for option in options]
    for at, one in enumerate(seen):
        if any(_overlap(one, other) for other in seen[at + 1 :]):
            raise GrammarError(f"oneOf at {path or '/'}: its options may overlap, which is not supported; use anyOf")


@dataclass(frozen=True, slots=True)
class _Marks:
    """What the documents of a schema are known to be: their types, their values if these are listed, and those of required properties."""

    kinds: frozenset[str]
    values: frozenset[str] | None = None
    members: Mapping[str, frozenset[str]] = field(default_factory=dict)


def _marks(option: Any, path: str, target: Target) -> _Marks:
    """What tells an option's documents from others."""
    if not isinstance(option, dict):
        return _Marks(frozenset(TYPES))
    option = flat(option, path, target)
    if "$ref" in option:
        found = target(option["$ref"], path) if isinstance(option["$ref"], str) else True
        return _Marks(frozenset(TYPES)) if isinstance(found, dict) and "$ref" in found else _marks(found, path, target)
    if (values := fixed(option)) is not None:
        return _Marks(frozenset(kind for kind in TYPES if any(is_kind(kind, value) for value in values)), frozenset(map(spelled, values)))
    if "anyOf" in option or "oneOf" in option:
        return _Marks(frozenset(TYPES))
    kinds = set(types_of(option, path))
    if kinds & {"number", "integer"}:
        kinds |= {"number", "integer"}
    members = {}
    if kinds == {"object"}:
        properties = as_mapping(option.get("properties"), f"{path}/properties")
        for name in as_list(option.get("required") or [], f"{path}/required"):
            if isinstance(inner := properties.get(name), dict) and (values := fixed(inner)) is not None:
                members[name] = frozenset(map(spelled, values))
    return _Marks(frozenset(kinds), None, members)


def _overlap(one: _Marks, other: _Marks) -> bool:
    """Whether a document could be both."""
    if not one.kinds & other.kinds:
        return False
    if one.values is not None and other.values is not None:
        return bool(one.values & other.values)
    return all(values & other.members[name] for name, values in one.members.items() if name in other.members)
