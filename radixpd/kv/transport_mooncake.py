"""Pages by Mooncake's Transfer Engine: TCP, or RDMA with `--disaggregation-ib-device`. See `one_sided` for what it can and cannot promise.

Its calls wait (for a connection up to a minute, for a peer that takes nothing half of one), so each peer has a thread that makes them, and
an eventfd tells the mover of their ends. Pools are found by `host:port` of the engine and raw addresses: no metadata server is needed.
Invariant: memory is known to the engine, and stays mapped, until the last thread has returned from it. The engine listens on every address
of the machine, whatever it is told.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
import weakref
from collections import deque
from pathlib import Path

import numpy as np

from radixpd.errors import ConfigError, PeerFailed
from radixpd.kv.one_sided import OneSided
from radixpd.kv.transport import Ground

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read when the library is loaded; it would write a line for every transfer

from mooncake.engine import TransferEngine

__all__ = ["MooncakeWire", "transport"]

logger = logging.getLogger(__name__)

DEVICES = Path("/sys/class/infiniband")
FAREWELL = 0.5  # seconds that `close` gives writes under way
FLAG = "--disaggregation-transfer-backend mooncake"

# Engines that nobody uses: destroying one stops every thread of the process for a second. By host, protocol, devices.
_spare: dict[tuple[str, str, str], list[TransferEngine]] = {}


def transport(ground: Ground) -> OneSided:
    """The `mooncake` transport."""
    return OneSided("mooncake", ground, MooncakeWire(ground))


class Ends:
    """What the threads say to the mover: writes that have ended."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)  # not earlier: a thread may be about to ring
        self._ended: deque[tuple[int, str]] = deque()

    def put(self, numbers: list[int], error: str) -> None:
        """These writes have ended."""
        self._ended.extend((number, error) for number in numbers)
        os.eventfd_write(self.fd, 1)

    def take(self) -> list[tuple[int, str]]:
        """All that has ended."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def heard(self, mask: int) -> None:
        """The selector's callback; `take` does the rest."""
        os.eventfd_read(self.fd)


class Engine:
    """A transfer engine that knows own memory. Whoever calls it holds it: `enter`, and `leave` in the end."""

    def __init__(self, rows: list[np.ndarray], host: str, device: str) -> None:
        self._key = (host, "rdma" if device else "tcp", device)
        if spare := _spare.get(self._key):
            self.library = spare.pop()
        else:
            self.library = TransferEngine()
            if self.library.initialize(host, "P2PHANDSHAKE", *self._key[1:]):
                raise ConfigError(f"{FLAG}: the transfer engine cannot start on {host}")
        self._rows, self._addresses = rows, [row.ctypes.data for row in rows]
        self._lock, self._users = threading.Lock(), 1
        if self.library.batch_register_memory(self._addresses, [row.nbytes for row in rows]):
            raise ConfigError(f"{FLAG}: the transfer engine cannot register the KV pool")

    def enter(self) -> None:
        """One more user."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """One less; with the last one the memory is forgotten."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        self.library.batch_unregister_memory(self._addresses)
        self._rows = []  # not earlier
        _spare.setdefault(self._key, []).append(self.library)


class Way:
    """To one peer. All writes that wait go out in one call, so that the library can fill the wire."""

    def __init__(self, engine: Engine, at: str, ends: Ends) -> None:
        self.at = at
        self._engine, self._ends = engine, ends
        self._waiting: dict[int, np.ndarray] = {}
        self._changed = threading.Condition()
        self._stop = False
        engine.enter()
        self._thread = threading.Thread(target=self._run, name=f"mooncake {at}", daemon=True)
        self._thread.start()

    def put(self, number: int, parts: np.ndarray) -> None:
        """See `Wire.write`."""
        with self._changed:
            self._waiting[number] = parts
            self._changed.notify()

    def withdraw(self, number: int) -> bool:
        """See `Wire.withdraw`."""
        with self._changed:
            return self._waiting.pop(number, None) is not None

    def stop(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._stop = True
            self._waiting.clear()
            self._changed.notify()

    def join(self, seconds: float) -> bool:
        """Whether the thread has ended in time."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while batch := self._next():
                parts = np.concatenate(list(batch.values()))
                self._ends.put(list(batch), self._carry(*parts.T.tolist()))
        finally:
            self._engine.leave()

    def _next(self) -> dict[int, np.ndarray]:
        """What waits, as soon as something does; nothing in the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop or bool(self._waiting))
            batch, self._waiting = self._waiting, {}
            return batch

    def _carry(self, own: list[int], there: list[int], sizes: list[int]) -> str:
        try:
            code = self._engine.library.batch_transfer_sync_write(self.at, own, there, sizes)
        except Exception as error:  # whatever fails in the library is the end of these writes, and of nothing else
            logger.exception("a transfer failed")
            return f"Mooncake: an internal fault ({type(error).__name__})"
        return f"Mooncake: the transfer to {self.at} has failed ({code})" if code else ""


class MooncakeWire:
    """See `Wire`."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._engine: Engine | None = None
        self._ways: dict[str, Way] = {}
        self._parted: list[Way] = []  # whose threads may still be in a call
        self._ends = Ends()

    def open(self, rows: list[np.ndarray]) -> str:
        """See `Wire`."""
        options = self._ground.options
        for name in filter(None, options.ib_device.split(",")):
            if not (DEVICES / name).exists():
                there = ", ".join(sorted(each.name for each in DEVICES.glob("*"))) or "none"
                raise ConfigError(f"--disaggregation-ib-device {name}: there is no such RDMA device; this machine has {there}")
        host = options.advertise or options.host
        self._engine = Engine(rows, host, options.ib_device)
        self._ground.selector.register(self._ends.fd, selectors.EVENT_READ, self._ends.heard)
        return f"{host}:{self._engine.library.get_rpc_port()}"

    def meet(self, peer: str, at: str) -> None:
        """See `Wire`. The connection is made for the first write."""
        host, _, port = at.rpartition(":")
        if not host or not port.isdecimal():
            raise PeerFailed(f"the peer's mooncake endpoint {at!r} is no host:port")
        if peer in self._ways and self._ways[peer].at == at:
            return
        self.part(peer)
        assert self._engine is not None
        self._ways[peer] = Way(self._engine, at, self._ends)

    def part(self, peer: str) -> None:
        """See `Wire`. What is in a call stays there until the library gives it up."""
        if (way := self._ways.pop(peer, None)) is not None:
            way.stop()
            self._parted = [each for each in (*self._parted, way) if not each.join(0)]

    def write(self, peer: str, number: int, parts: np.ndarray) -> None:
        """See `Wire`."""
        self._ways[peer].put(number, parts)

    def withdraw(self, number: int) -> bool:
        """See `Wire`."""
        return any(way.withdraw(number) for way in self._ways.values())

    def poll(self) -> list[tuple[int, str]]:
        """See `Wire`."""
        return self._ends.take()

    def close(self) -> None:
        """See `Wire`."""
        if self._engine is None:
            return
        for peer in list(self._ways):
            self.part(peer)
        until = time.monotonic() + FAREWELL
        if any(not way.join(until - time.monotonic()) for way in self._parted):
            logger.warning("a transfer of mooncake is still under way: the pool's memory stays until it ends")
        self._ground.selector.unregister(self._ends.fd)
        self._engine.leave()
        self._engine = None
