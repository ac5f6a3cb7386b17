"""Tell somebody each layer whose KV a forward has written, so that it can leave while the next layer is computed.

The model calls `attend` once a layer, and `attend` stores the layer's keys and values before it returns; so the place to listen is right
behind it. Used by the runner around the function that its attention backend has planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from radixpd.attention.base import Attend
from radixpd.core.step import Send

__all__ = ["Departures", "Late", "telling"]


class Departures(Protocol):
    """Where pages leave for other servers while the forward runs; nothing here waits."""

    def begin(self, sends: Sequence[Send]) -> None:
        """A step starts; these are its sends."""
        ...

    def layer_done(self, layer: int) -> None:
        """This layer's KV of the step is written."""
        ...


class Late:
    """Departures without overlap: no layer leaves before the last one is written. For comparison."""

    def __init__(self, departures: Departures, *, layers: int) -> None:
        self._departures = departures
        self._layers = layers

    def begin(self, sends: Sequence[Send]) -> None:
        """See `Departures`."""
        self._departures.begin(sends)

    def layer_done(self, layer: int) -> None:
        """See `Departures`."""
        if layer == self._layers - 1:
            for each in range(self._layers):
                self._departures.layer_done(each)


def telling(attend: Attend, layer_done: Callable[[int], None]) -> Attend:
    """The same `attend`; `layer_done(layer)` follows each call. It is called on the forward's thread and must not wait."""

    def told(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = attend(layer, q, k, v)
        layer_done(layer)
        return out

    return told
