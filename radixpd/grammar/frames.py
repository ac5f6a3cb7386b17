"""What the model runner and the grammar compiler say to each other, over a pair of pipes: length-prefixed JSON, each with a blob behind it.

Never pickle: a compiler that a hostile grammar has taken over could send anything. Called by `library` and `workshop`.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from typing import Any

__all__ = ["MAX_FRAME", "Frames", "frame", "write_all"]

HEAD = struct.Struct("<II")
MAX_FRAME = 256 * 2**20


def frame(message: dict[str, Any], blob: bytes = b"") -> bytes:
    """One message as bytes."""
    text = json.dumps(message).encode()
    return HEAD.pack(len(text), len(blob)) + text + blob


def write_all(fd: int, data: bytes) -> None:
    """Write to a blocking pipe."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Frames:
    """Messages out of bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Everything that is whole now. Raises ValueError for what is no message."""
        self._data += data
        while len(self._data) >= HEAD.size:
            text, blob = HEAD.unpack_from(self._data)
            if text + blob > MAX_FRAME:
                raise ValueError("a message is too long")
            if len(self._data) < HEAD.size + text + blob:
                return
            body = bytes(self._data[HEAD.size : HEAD.size + text + blob])
            del self._data[: HEAD.size + text + blob]
            message = json.loads(body[:text])
            if not isinstance(message, dict):
                raise ValueError("a message is no object")
            yield message, body[text:]
