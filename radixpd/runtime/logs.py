"""How log lines look: one format for every process, text or JSON, on standard error.

A record may carry `fields` (a dict, by `extra={"fields": ...}`): text shows them as `key=value`, JSON as keys of the line's object.
Invariant: whatever a client wrote stays on one line and cannot imitate another: control characters are escaped. Called by the start of
every process, and by the request log for a stream of its own.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

__all__ = ["FORMATS", "JsonFormat", "TextFormat", "formatter", "log_to_stderr"]

FORMATS = ("text", "json")
PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:/+@")


class TextFormat(logging.Formatter):
    """`[2026-01-31 12:00:00 api] INFO message key=value`."""

    def __init__(self, process: str) -> None:
        super().__init__(f"[%(asctime)s {process}] %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        return " ".join([super().formatMessage(record), *(f"{name}={_shown(value)}" for name, value in fields.items())])


class JsonFormat(logging.Formatter):
    """One object a line: time, level, process, message, fields, and the trace of an exception."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def formatter(process: str, kind: str) -> logging.Formatter:
    """The formatter of one of `FORMATS`."""
    return JsonFormat(process) if kind == "json" else TextFormat(process)


def log_to_stderr(process: str, level: str, kind: str = "text") -> None:
    """Send all logs of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(process, kind))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)  # of libraries, which would print them past the format


def _shown(value: Any) -> str:
    if isinstance(value, str) and value and PLAIN.issuperset(value):
        return value
    text = json.dumps(value, ensure_ascii=False, default=str)
    # JSON leaves some invisible characters as they are: line separators, terminal controls, halves of a surrogate pair.
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)
