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
        if b"\r" in text:
            # A carriage return at the very end waits for its line feed.
            held = b"\r" if text.endswith(b"\r") else b""
            text = text[: len(text) - len(held)].replace(b"\r\n", b"\n") + held
        *events, self._rest = text.split(b"\n\n")
        return [payload for event in events if (payload := _payload(event))]


def _payload(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
