"""Tokens to text, one token at a time.

`ByteStream` serves every vocabulary whose tokens stand for bytes (byte-level BPE, SentencePiece with byte fallback): an incremental
UTF-8 decoder holds at most three bytes, so text flows whatever the model writes, time per token never grows, and the joined text
equals the decoding of all bytes at once. `WindowStream` serves any other decoder by decoding a short window twice; it commits a
replacement character after `LOOK_BACK` tokens. The tokenizers build these; the detokenizer drives them.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

__all__ = ["LOOK_BACK", "ByteStream", "TokenStream", "WindowStream", "decode_bytes"]

LOOK_BACK = 4  # tokens; no character is longer than four bytes
Ids = Sequence[int] | np.ndarray
REPLACEMENT = "\ufffd"

_utf8 = codecs.getincrementaldecoder("utf-8")


class TokenStream(Protocol):
    """Text of one growing output."""

    def push(self, id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is still held, at the end of the output."""
        ...


def decode_bytes(chunks: Sequence[bytes], *, strip: bool) -> str:
    """The text of a whole sequence; `strip` drops the one leading space that SentencePiece puts before every text."""
    text = b"".join(chunks).decode("utf-8", "replace")
    return text[1:] if strip and text.startswith(" ") else text


class ByteStream:
    """See the module. `pieces` gives a token's bytes, empty for tokens that are not shown.

    An output that follows a visible context keeps its leading space: it continues a text.
    """

    __slots__ = ("_decoder", "_pieces", "_strip")

    def __init__(self, pieces: Callable[[int], bytes], *, context: Ids, strip: bool) -> None:
        self._pieces = pieces
        self._decoder = _utf8("replace")
        tail = _visible_tail(pieces, context)
        for chunk in tail:  # a prompt may end inside a character; the output then completes it
            self._decoder.decode(chunk)
        self._strip = strip and not tail

    def push(self, id: int) -> str:
        text = self._decoder.decode(self._pieces(id))
        if self._strip and text:
            self._strip = False
            return text[1:] if text[0] == " " else text
        return text

    def flush(self) -> str:
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text


def _visible_tail(pieces: Callable[[int], bytes], context: Ids) -> list[bytes]:
    """The last few non-empty pieces, in order: enough to know whether a character is open at the end."""
    tail: list[bytes] = []
    for index in range(len(context) - 1, -1, -1):
        chunk = pieces(int(context[index]))
        if chunk:
            tail.append(chunk)
            if len(tail) == LOOK_BACK:
                break
    return tail[::-1]


class WindowStream:
    """Incremental text over any `decode` function. `shown` tells which tokens reach the text at all."""

    __slots__ = ("_decode", "_read", "_shown", "_window")

    def __init__(self, decode: Callable[[list[int]], str], shown: Callable[[int], bool], *, context: Ids) -> None:
        self._decode = decode
        self._shown = shown
        # Hidden tokens at the end of the context would fill the window; look a little further back instead.
        self._window = [int(id) for id in context[-4 * LOOK_BACK :] if shown(int(id))][-LOOK_BACK:]
        self._read = len(self._window)

    def push(self, id: int) -> str:
        if not self._shown(id):
            return ""
        self._window.append(id)
        text = self._new_text()
        incomplete = not text or text.endswith(REPLACEMENT)
        if incomplete and len(self._window) - self._read < LOOK_BACK:
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._read = len(self._window)
        return text

    def _new_text(self) -> str:
        return self._decode(self._window)[len(self._decode(self._window[: self._read])) :]
