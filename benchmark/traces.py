"""Readers of files that tell a workload: Mooncake and Azure traces, ShareGPT conversations, custom JSONL.

Each returns plain rows in the file's order, the first `count` of them, and names the file and the line in whatever it refuses. Times are
seconds since the first row. Called by `workloads`.
"""

from __future__ import annotations

import csv
import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from radixpd.errors import ConfigError

__all__ = ["CustomRow", "TraceRow", "read_azure", "read_custom", "read_mooncake", "read_sharegpt"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace: lengths without texts. Equal `hash_ids` at the start mean equal blocks of 512 tokens at the start."""

    time: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CustomRow:
    """One request of a custom file. `answer` stands for an output as long as itself."""

    prompt: str | list[int]
    output_len: int | None
    answer: str | None = None
    time: float | None = None


class MooncakeLine(msgspec.Struct):
    """A line of a Mooncake trace; the timestamp is in milliseconds."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class CustomLine(msgspec.Struct):
    """A line of a custom file: `prompt` and `output_len`, or `conversations` whose first two texts are prompt and answer."""

    prompt: str | list[int] | None = None
    output_len: int | None = None
    conversations: list[dict[str, Any]] | None = None
    timestamp: float | None = None  # milliseconds


class Conversation(msgspec.Struct):
    """An entry of a ShareGPT file."""

    conversations: list[dict[str, Any]] = []


def read_mooncake(path: str, count: int) -> list[TraceRow]:
    """JSONL: timestamp (ms), input_length, output_length, hash_ids."""
    rows = [
        TraceRow(line.timestamp / 1000, _positive(line.input_length, where), _positive(line.output_length, where), tuple(line.hash_ids))
        for where, line in _lines(path, MooncakeLine, count)
    ]
    return _from_zero(rows, path)


def read_azure(path: str, count: int) -> list[TraceRow]:
    """CSV: TIMESTAMP, ContextTokens, GeneratedTokens."""
    rows = []
    with _open(path) as file:
        for number, line in islice(enumerate(csv.DictReader(file), start=2), count):
            where = f"{path}, line {number}"
            try:
                time = datetime.datetime.fromisoformat(line["TIMESTAMP"]).timestamp()
                lengths = int(line["ContextTokens"]), int(line["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{where}: no row of TIMESTAMP, ContextTokens, GeneratedTokens ({error})") from None
            rows.append(TraceRow(time, _positive(lengths[0], where), _positive(lengths[1], where)))
    return _from_zero(rows, path)


def read_sharegpt(path: str) -> list[tuple[str, str]]:
    """A JSON list of conversations: the first two texts of each that has two."""
    try:
        entries = msgspec.json.decode(Path(path).read_bytes(), type=list[Conversation])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--dataset-path {path}: no JSON list of conversations ({error})") from None
    pairs = [pair for entry in entries if (pair := _first_pair(entry.conversations)) is not None]
    if not pairs:
        raise ConfigError(f"--dataset-path {path}: no conversation has two texts")
    return pairs


def read_custom(path: str, count: int) -> list[CustomRow]:
    """JSONL of prompts; see `CustomLine`."""
    rows = []
    for where, line in _lines(path, CustomLine, count):
        pair = _first_pair(line.conversations or [])
        prompt = line.prompt if line.prompt is not None else pair[0] if pair else None
        answer = None if line.prompt is not None or pair is None else pair[1]
        if not prompt:
            raise ConfigError(f"{where}: neither prompt nor conversations with two texts")
        time = None if line.timestamp is None else line.timestamp / 1000
        rows.append(CustomRow(prompt, line.output_len and _positive(line.output_len, where), answer, time))
    times = [row.time for row in rows if row.time is not None]
    if times and len(times) < len(rows):
        raise ConfigError(f"--dataset-path {path}: some lines have a timestamp and some have none")
    first = min(times, default=0.0)
    return [CustomRow(row.prompt, row.output_len, row.answer, None if row.time is None else row.time - first) for row in rows]


def _first_pair(conversation: Sequence[dict[str, Any]]) -> tuple[str, str] | None:
    texts = [text for turn in conversation[:2] if isinstance(text := turn.get("value", turn.get("content")), str) and text]
    return (texts[0], texts[1]) if len(texts) == 2 else None


def _lines(path: str, kind: type[T], count: int) -> Iterator[tuple[str, T]]:
    """The first `count` lines that are not empty, each with its place."""
    decoder = msgspec.json.Decoder(kind)
    with _open(path) as file:
        filled = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        for number, line in islice(filled, count):
            where = f"--dataset-path {path}, line {number}"
            try:
                yield where, decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{where}: {error}") from None


def _open(path: str) -> Any:
    try:
        return Path(path).open(encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror}") from None


def _positive(length: int, where: str) -> int:
    if length < 1:
        raise ConfigError(f"{where}: a length of {length} tokens; it must be at least 1")
    return length


def _from_zero(rows: list[TraceRow], path: str) -> list[TraceRow]:
    if not rows:
        raise ConfigError(f"--dataset-path {path}: no rows")
    first = min(row.time for row in rows)
    ordered = sorted(rows, key=lambda row: row.time)  # stable: equal times keep the file's order
    return [TraceRow(row.time - first, row.input_len, row.output_len, row.hash_ids) for row in ordered]
