"""Server-sent events, read back."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["parse_events"]


def parse_events(text: str) -> list[Any]:
    """Server-sent events as JSON."""
    found = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in found]
