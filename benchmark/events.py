"""Server-sent events out of a byte stream: what is between `data:` and the blank line, however the network has cut it.

Called by `client` with every piece that the socket gives.
"""

from __future__ import annotations

__all__ = ["EventSplitter"]


class EventSplitter:
    """Feed pieces in order; each call returns the payloads that became complete. Comments and other fields are dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Payloads of the events that end in this piece."""
        text = self._rest + piece
        if b"\r" in text:  # a half of a line's end waits in `_rest` for the other
            text = text.replace(b"\r\n", b"\n")
        *events, self._rest = text.split(b"\n\n")
        return [payload for event in events if (payload := _payload(event))]


def _payload(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
