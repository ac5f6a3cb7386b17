"""Requests with many prompts: a field holds one value for all of them, or a list with one for each.

The room where a prompt is handed over between servers is such a field with rules of its own. Called by the generation routes and by the
offline interface.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from radixpd.errors import BadRequest, RadixpdError
from radixpd.runtime.admission import RANGES
from radixpd.runtime.tokenizer_manager import TokenizerManager

__all__ = ["MAX_BATCH", "ROOM", "check_rid", "pick", "pick_all", "pick_room", "refusals_told"]

MAX_BATCH = 4096  # prompts of one request
ROOM = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


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


def pick_room(body: Any, index: int, count: int | None, samples: Any) -> dict[str, Any]:
    """The fields of `body` that name the room of prompt `index`: one number stands for as many rooms as there are prompts, counted up from
    it. The `samples` of a prompt share its room, but routers send one value for each where a prompt comes alone: the first counts."""
    fields = {name: getattr(body, name) for name in ROOM}
    if count is None and type(samples) is int and samples > 1:
        fields = {name: _shared(value, samples, name) for name, value in fields.items()}
    picked = pick_all(fields, index, count)
    if isinstance(fields["bootstrap_room"], int):
        picked["bootstrap_room"] = _counted_up(fields["bootstrap_room"], index, count)
    return picked


def _counted_up(first: int, index: int, count: int | None) -> int:
    _, high = RANGES["bootstrap_room"]
    if first <= high < first + (count or 1) - 1:
        raise BadRequest(
            f"bootstrap_room: {count} prompts take the rooms from {first} up, and the highest is {high}", param="bootstrap_room"
        )
    return first + index


@contextmanager
def refusals_told(raw: dict[str, Any], manager: TokenizerManager) -> Iterator[None]:
    """While a body is looked at: if it is turned away, the other half of its handoff hears of that and need not wait for it."""
    try:
        yield
    except RadixpdError as error:
        prompts = raw.get("text") or raw.get("prompt") or raw.get("input_ids")
        count = len(prompts) if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list) else 1
        manager.turned_away([raw.get(name) for name in ROOM], min(count, MAX_BATCH), error)
        raise


def _shared(value: Any, samples: int, name: str) -> Any:
    if not isinstance(value, list) or len(value) != samples:
        return value
    if name != "bootstrap_room" and any(item != value[0] for item in value):
        raise BadRequest(f"{name}: samples of one prompt are computed on one server, so the {samples} values must be equal", param=name)
    if name == "bootstrap_room":
        low, high = RANGES[name]
        for item in value:
            if not low <= item <= high:
                raise BadRequest(f"{name} must be between {low} and {high}, got {item}", param=name)
    return value[0]
