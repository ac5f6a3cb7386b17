"""Traces in Mooncake's columns: read from a file, or drawn so that their caching behaves like the published conversation trace.

A line is `{"timestamp": ms, "input_length", "output_length", "hash_ids"}`; an equal id means an equal whole prefix up to that block of 512
tokens. Refusals name the file, the line and the field. Used by `simulate`; time and randomness are arguments.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from radixpd.errors import ConfigError

__all__ = ["BLOCK_TOKENS", "Arrival", "generate", "read", "write"]

BLOCK_TOKENS = 512

# Drawn from: values at equal steps of probability, from 0 to 1, rounded from the conversation trace of Mooncake (FAST'25).
FIRST_TOKENS = (891, 905, 1092, 1756, 3914, 5264, 7417, 10775, 15871, 25561, 120000)
ADDED_TOKENS = (-4000, 0, 116, 266, 368, 454, 547, 696, 1497, 4622, 25000)
OUTPUT_TOKENS = (1, 24, 100, 213, 291, 350, 399, 447, 504, 597, 1800)
GAP_SECONDS = (1, 45, 66, 84, 110, 145, 190, 260, 370, 560, 3000)
GOES_ON = (0.31, 0.42, 0.51, 0.59, 0.6, 0.68, 0.75)  # after the first, second... turn; the last for all that follow
FIRSTS_PER_SECOND = 2.15
TAIL = 1.8


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. Times are seconds since the trace began."""

    time: float
    tokens: int
    output: int
    blocks: tuple[int, ...]


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read(path: str, most: int | None = None) -> list[Arrival]:
    """The first `most` requests of a trace file, in order of time."""
    decoder = msgspec.json.Decoder(_Line)
    arrivals: list[Arrival] = []
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if most is not None and len(arrivals) >= most:
                    break
                if line.strip():
                    arrivals.append(_arrival(decoder, line, f"--simulate {path}, line {number}"))
    except OSError as error:
        raise ConfigError(f"--simulate {path}: {error.strerror}") from None
    if not arrivals:
        raise ConfigError(f"--simulate {path}: there are no requests in it")
    return sorted(arrivals, key=lambda arrival: arrival.time)


def write(path: str, arrivals: Iterable[Arrival]) -> None:
    """A trace file."""
    try:
        with Path(path).open("wb") as file:
            for each in arrivals:
                line = _Line(round(each.time * 1000), each.tokens, each.output, list(each.blocks))
                file.write(msgspec.json.encode(line) + b"\n")
    except OSError as error:
        raise ConfigError(f"--generate-trace {path}: {error.strerror}") from None


def generate(count: int, seed: int) -> list[Arrival]:
    """Conversations that share one system prompt block and come back to their own history; the first `count` requests of them."""
    draw = random.Random(seed)
    due: list[tuple[float, int, _Talk]] = []
    arrivals: list[Arrival] = []
    start, blocks, talks = 0.0, 0, 0
    while len(arrivals) < count:
        while not due or start <= due[0][0]:
            talks += 1
            heapq.heappush(due, (start, talks, _Talk([0], round(_quantile(FIRST_TOKENS, draw)))))
            start += draw.expovariate(FIRSTS_PER_SECOND)
        now, number, talk = heapq.heappop(due)
        whole = -(-talk.tokens // BLOCK_TOKENS)
        fresh = range(blocks + 1, blocks + 1 + whole - len(talk.blocks))
        blocks += len(fresh)
        talk.blocks += fresh
        arrivals.append(Arrival(now, talk.tokens, round(_quantile(OUTPUT_TOKENS, draw)), tuple(talk.blocks)))
        if draw.random() < GOES_ON[min(talk.turns, len(GOES_ON) - 1)]:
            talk.go_on(round(_quantile(ADDED_TOKENS, draw)))
            heapq.heappush(due, (now + _quantile(GAP_SECONDS, draw), number, talk))
    return arrivals


@dataclass(slots=True)
class _Talk:
    """One conversation: its blocks so far and the length of its next prompt."""

    blocks: list[int]
    tokens: int
    turns: int = 0

    def go_on(self, added: int) -> None:
        """The next prompt: only whole blocks are kept, the last one gets other content."""
        tokens = max(self.tokens + added, 2 * BLOCK_TOKENS)
        del self.blocks[max(1, min(self.tokens, tokens) // BLOCK_TOKENS) :]
        self.tokens = tokens
        self.turns += 1


def _quantile(values: tuple[float, ...], draw: random.Random) -> float:
    """A value drawn from a distribution given by its quantiles: between them on a line, in the long last step mostly near its start."""
    at = draw.random() * (len(values) - 1)
    low, high = values[int(at)], values[int(at) + 1]
    share = at - int(at)
    if int(at) == len(values) - 2:
        return low * float((high / low) ** (share**TAIL))
    return low + (high - low) * share


def _arrival(decoder: msgspec.json.Decoder[_Line], line: bytes, where: str) -> Arrival:
    try:
        row = decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{where}: {error}") from None
    if not math.isfinite(row.timestamp) or row.timestamp < 0:
        raise ConfigError(f"{where}: timestamp must be 0 or more, got {row.timestamp}")
    if row.input_length < 1 or row.output_length < 0:
        raise ConfigError(f"{where}: input_length must be 1 or more and output_length 0 or more")
    if len(row.hash_ids) != -(-row.input_length // BLOCK_TOKENS):
        raise ConfigError(f"{where}: hash_ids must have one id for every {BLOCK_TOKENS} tokens of input_length, got {len(row.hash_ids)}")
    if len(set(row.hash_ids)) != len(row.hash_ids):
        raise ConfigError(f"{where}: hash_ids names a block twice")
    return Arrival(row.timestamp / 1000, row.input_length, row.output_length, tuple(row.hash_ids))
