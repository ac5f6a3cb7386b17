"""Requests with many prompts: a field holds one value for all of them, or a list with one for each.

Called by the native and the completions route.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixpd.errors import BadRequest

__all__ = ["MAX_BATCH", "check_rid", "pick", "pick_all"]

MAX_BATCH = 4096  # prompts of one request


def check_rid(rid: Any, count: int | None) -> None:
    """One name cannot stand for many prompts."""
    if count is not None and isinstance(rid, str):
        raise BadRequest("rid must be a list, one for each prompt", param="rid")


def pick(value: Any, index: int, count: int | None, name: str) -> Any:
    """The value for prompt `index` of `count` (None: the prompt did not come in a list)."""
    if not isinstance(value, list):
        return value
    expected = 1 if count is None else count
    if len(value) != expected:
        raise BadRequest(f"{name} holds {len(value)} values for {expected} prompts", param=name)
    return value[index]


def pick_all(fields: Mapping[str, Any], index: int, count: int | None) -> dict[str, Any]:
    """`pick` for each field."""
    return {name: pick(value, index, count, name) for name, value in fields.items()}
