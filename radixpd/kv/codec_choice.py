"""Which codec a send goes through: what `--disaggregation-transfer-dtype` asks for, and the choice among several by measured speeds.

Pure: no tensors, no clock. A send's encoding, wire and decoding overlap (layer by layer), so the slowest of the three is the time that
it takes. Invariant: only codecs that the operator listed are ever chosen, and plain pages; of two that take equally long the less lossy
one wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixpd.errors import ConfigError

__all__ = ["NAMES", "NONE", "Chooser", "Speed", "carriers", "choose", "listed", "seconds"]

NONE = "none"
NAMES = (NONE, "fp8_e4m3", "int8", "int4")
CARRIERS = ("tcp",)  # transports whose receiver can decode what comes
WORTH = 0.8  # of the time that the codec in use takes: a change to another one saves at least the rest
_FLAG = "--disaggregation-transfer-dtype"
_AUTO = "auto:"


@dataclass(frozen=True, slots=True)
class Speed:
    """What a codec does on this pair of machines; both rates in raw (uncoded) bytes per second, `ratio` = coded / raw bytes."""

    name: str
    encode: float
    decode: float
    ratio: float

    def __post_init__(self) -> None:
        if not (self.encode > 0 and self.decode > 0 and self.ratio > 0):  # also false for NaN
            raise ValueError(f"codec {self.name}: speeds and ratio must be above 0, not {self.encode}, {self.decode}, {self.ratio}")


def listed(value: str) -> tuple[str, ...]:
    """The codecs that a value of the flag allows, in its order: one for a name, those listed for `auto:<list>`."""
    names = tuple(name.strip() for name in value[len(_AUTO) :].split(",")) if value.startswith(_AUTO) else (value,)
    for name in names:
        if name not in NAMES:
            hint = f"auto takes a list, for example auto:{','.join(NAMES)}" if name in ("auto", "") else f"known: {', '.join(NAMES)}"
            raise ConfigError(f"{_FLAG} {value}: {name or 'an empty name'} is not a transfer dtype ({hint})")
    if len(set(names)) < len(names):
        raise ConfigError(f"{_FLAG} {value}: a transfer dtype is listed twice")
    return names


def seconds(speed: Speed, raw_bytes: float, link: float) -> float:
    """Time that `raw_bytes` take through this codec and a link of `link` bytes per second."""
    return max(raw_bytes / speed.encode, raw_bytes * speed.ratio / link, raw_bytes / speed.decode)


def choose(speeds: Sequence[Speed], raw_bytes: float, link: float) -> str:
    """Name of the codec that brings `raw_bytes` over soonest."""
    if not speeds:
        raise ValueError("no codec to choose from")
    if not (link > 0 and raw_bytes >= 0):
        raise ValueError(f"link speed must be above 0 and bytes not below, got {link} and {raw_bytes}")
    return min(speeds, key=lambda speed: (seconds(speed, raw_bytes, link), -speed.ratio)).name


def carriers(backend: str, dtype: str) -> tuple[str, ...]:
    """The transports that a value of `--disaggregation-transfer-backend` allows beside one of the transfer dtype. Raises ConfigError."""
    plain = listed(dtype) == (NONE,)
    if backend == "auto":
        return ("shm", *CARRIERS) if plain else CARRIERS
    if not plain and backend not in CARRIERS:
        raise ConfigError(
            f"{_FLAG} {dtype} needs --disaggregation-transfer-backend {' or '.join(CARRIERS)} (or auto): {backend} puts pages straight "
            "into the other server's pool, and nobody there decodes them"
        )
    return (backend,)


class Chooser:
    """The choice for one peer, made anew for each send. `speeds`: of what is listed and of plain pages. Until the link's speed is known,
    and while it makes little difference, it stays what it was: plain pages at first."""

    def __init__(self, speeds: Sequence[Speed]) -> None:
        self._speeds = {speed.name: speed for speed in speeds}
        self.name = NONE

    def pick(self, raw_bytes: float, link: float | None) -> str:
        """For a send of so many bytes, over a link of `link` bytes a second (None: not known, or not any more)."""
        if link is None:
            self.name = NONE
            return self.name
        name = choose(tuple(self._speeds.values()), raw_bytes, link)
        if seconds(self._speeds[name], raw_bytes, link) <= WORTH * seconds(self._speeds[self.name], raw_bytes, link):
            self.name = name
        return self.name
