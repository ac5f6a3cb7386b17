"""Sockets between the processes of one server, and the one encoding they use.

Each link is a ZMQ PUSH/PULL pair over ipc in a private 0700 directory; every message is a msgpack tagged struct (`messages`),
numpy arrays are an extension type holding dtype, shape and raw bytes. Receivers drain: a wake-up may stand for many messages. No
socket waits for ever on close (LINGER 0), queues are unbounded (admission bounds them). Arrays come out read-only, views of the frame.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import zmq

__all__ = ["Addresses", "Receiver", "Sender", "decoder", "encode"]

Message = TypeVar("Message")
ARRAY = 1  # msgpack extension code


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the links of one server lie: files in its private directory."""

    directory: str

    def _ipc(self, name: str) -> str:
        return f"ipc://{Path(self.directory) / name}"

    @property
    def to_scheduler(self) -> str:
        """API process -> scheduler (the scheduler binds)."""
        return self._ipc("to_scheduler")

    @property
    def to_api(self) -> str:
        """Scheduler -> API process (the API process binds)."""
        return self._ipc("to_api")

    @property
    def from_runner(self) -> str:
        """Runners -> scheduler (the scheduler binds)."""
        return self._ipc("from_runner")

    @property
    def from_mover(self) -> str:
        """Movers -> scheduler (the scheduler binds)."""
        return self._ipc("from_mover")

    def to_runner(self, rank: int) -> str:
        """Scheduler -> runner `rank` (the runner binds)."""
        return self._ipc(f"to_runner_{rank}")

    def to_mover(self, rank: int) -> str:
        """Scheduler -> the mover of runner `rank` (the runner binds)."""
        return self._ipc(f"to_mover_{rank}")


def _pack(value: Any) -> msgspec.msgpack.Ext:
    if isinstance(value, np.ndarray):
        head = value.dtype.str.encode() + struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
        return msgspec.msgpack.Ext(ARRAY, head + value.tobytes())
    raise TypeError(f"cannot send a {type(value).__name__}")


def _unpack(code: int, data: memoryview) -> np.ndarray:
    if code != ARRAY:
        raise msgspec.ValidationError(f"unknown extension {code}")
    try:
        dtype, ndim = np.dtype(bytes(data[:3]).decode()), data[3]
        shape = struct.unpack_from(f"<{ndim}I", data, 4)
        return np.frombuffer(data, dtype=dtype, offset=4 + 4 * ndim).reshape(shape)
    except (TypeError, ValueError, IndexError, struct.error) as error:
        raise msgspec.ValidationError(f"not an array: {error}") from None


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)


def encode(message: msgspec.Struct) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder of one message type or union of them; anything else raises `msgspec.ValidationError`."""
    return msgspec.msgpack.Decoder(kind, ext_hook=_unpack)


def _open(context: zmq.Context[Any], kind: int, address: str, *, bind: bool) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


class Sender:
    """The sending end. ZMQ sockets belong to one thread; so does this."""

    def __init__(self, context: zmq.Context[Any], address: str, *, bind: bool = False) -> None:
        self.socket = _open(context, zmq.PUSH, address, bind=bind)

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message; never blocks (without a peer yet, ZMQ keeps it)."""
        self.socket.send(encode(message), copy=True)

    def close(self, *, linger_ms: int = 0) -> None:
        """Close; with `linger_ms`, give queued messages that long to leave."""
        self.socket.close(linger=linger_ms)


class Receiver(Generic[Message]):
    """The receiving end; `kind` is the union of messages that may arrive."""

    def __init__(self, context: zmq.Context[Any], address: str, kind: Any, *, bind: bool = False) -> None:
        self.socket = _open(context, zmq.PULL, address, bind=bind)
        self._decoder = decoder(kind)

    def drain(self) -> Iterator[Message]:
        """All messages that have arrived, without waiting."""
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield self._decoder.decode(frame)

    def close(self) -> None:
        """Close at once."""
        self.socket.close(linger=0)
