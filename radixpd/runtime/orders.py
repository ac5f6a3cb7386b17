"""Orders that every process carries out in the same way, whoever it is: how much it logs, and what its garbage collector looks at.

They come through `/configure_logging` and `/freeze_gc`; the API process obeys at once and sends them to scheduler and runner as `Control`
messages. Invariant: an order changes nothing that a client could see in an answer.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

__all__ = ["ORDERS", "obey"]


def obey(action: str, args: dict[str, Any]) -> dict[str, Any]:
    """Carry out one of `ORDERS`; the body of the reply."""
    return ORDERS[action](**args)


def _configure_logging(*, log_level: str) -> dict[str, Any]:
    logging.getLogger().setLevel(log_level.upper())
    return {"log_level": log_level}


def _freeze_gc() -> dict[str, Any]:
    """What lives now lives for long: the collector need not look at it again, so its pauses are shorter."""
    gc.collect()
    gc.freeze()
    return {"frozen": gc.get_freeze_count()}


ORDERS: dict[str, Callable[..., dict[str, Any]]] = {"configure_logging": _configure_logging, "freeze_gc": _freeze_gc}
