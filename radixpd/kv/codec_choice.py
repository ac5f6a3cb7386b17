"""Which codec a send goes through: what `--disaggregation-transfer-dtype` asks for, and the choice among several by measured speeds.

Pure: no tensors, no clock. A send's encoding, wire and decoding overlap (layer by layer), so the slowest of the three is the time that
it takes. Invariant: only codecs that the operator listed are ever chosen; of two that take equally long the less lossy one wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixpd.errors import ConfigError

__all__ = ["NAMES", "Speed", "choose", "listed", "seconds"]

NAMES = ("none", "fp8_e4m3", "int8", "int4")
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
