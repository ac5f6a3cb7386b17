"""Pages by NIXL over UCX: shared memory, RDMA or TCP, whatever both machines have. See `one_sided` for what it can and cannot promise.

All calls are made on the mover's thread. NIXL's own progress thread would burn a core in every process, so the library moves on when it is
polled: by the sender while something is under way, by the receiver while a room is expected. An agent's metadata holds the keys of its
memory; peers get it as `Region.at`. A connection that has failed stays so: the peer is made known anew for the next write.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from radixpd.errors import ConfigError, PeerFailed
from radixpd.kv.one_sided import OneSided
from radixpd.kv.transport import Ground

__all__ = ["NixlWire", "transport"]

MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")  # the package itself, or one of its wheels alone
LOOPBACK = ("127.", "localhost", "::1")
HASTE = 0.001  # seconds between two polls while something is under way
WATCH = 0.002  # while rooms are expected
LONG = 1 << 20  # metadata is shorter


def _library() -> Any:
    """NIXL's Python interface. It would write its log to stdout."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    for name in MODULES:
        try:
            library = import_module(name)
        except ModuleNotFoundError:
            continue
        log = logging.getLogger("nixl")
        log.handlers.clear()
        log.propagate = True
        return library
    raise ImportError(f"none of {', '.join(MODULES)} is installed")


NIXL = _library()
ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    *(each for each in vars(NIXL.nixlBind).values() if isinstance(each, type) and issubclass(each, Exception)),
)


def transport(ground: Ground) -> OneSided:
    """The `nixl` transport."""
    return OneSided("nixl", ground, NixlWire(ground))


@dataclass(slots=True, eq=False)
class Flight:
    """A write that has begun."""

    peer: str
    handle: Any = None


class NixlWire:
    """See `Wire`."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._agent: Any = None
        self._memory: Any = None
        self._known: dict[str, bytes] = {}  # peer -> its agent's metadata
        self._names: dict[str, str] = {}  # peer -> its agent, where that has been made known to ours
        self._flying: dict[int, Flight] = {}
        self._ended: list[tuple[int, str]] = []

    def open(self, rows: list[np.ndarray]) -> str:
        """See `Wire`."""
        if self._ground.options.host.startswith(LOOPBACK):
            os.environ.setdefault("UCX_NET_DEVICES", "lo")  # UCX has no other way to be told where it may listen
        name = f"radixpd-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            self._agent = NIXL.nixl_agent(name, NIXL.nixl_agent_config(enable_prog_thread=False, backends=[]))
            self._agent.create_backend("UCX", {})
            self._memory = self._agent.register_memory([(row.ctypes.data, row.nbytes, 0, "") for row in rows], "DRAM")
            return base64.b64encode(self._agent.get_agent_metadata()).decode()
        except ERRORS as error:
            raise ConfigError(f"--disaggregation-transfer-backend nixl: NIXL cannot start: {error}") from error

    def meet(self, peer: str, at: str) -> None:
        """See `Wire`. The connection is made for the first write."""
        try:
            metadata = base64.b64decode(at, validate=True)
        except binascii.Error as error:
            raise PeerFailed(f"the peer's nixl endpoint makes no sense: {error}") from error
        if not 0 < len(metadata) < LONG:
            raise PeerFailed(f"the peer's nixl endpoint has {len(metadata)} bytes of metadata")
        self._known[peer] = metadata

    def part(self, peer: str) -> None:
        """See `Wire`."""
        self._disconnect(peer, "it was broken off")
        self._known.pop(peer, None)

    def write(self, peer: str, number: int, parts: np.ndarray) -> None:
        """See `Wire`. Between processes of one host the bytes may be in place when this returns."""
        self._hurry(HASTE)
        self._flying[number] = Flight(peer)
        self._step(number, lambda: self._start(self._flying[number], parts))

    def withdraw(self, number: int) -> bool:
        """See `Wire`. Every write has begun."""
        return False

    def poll(self) -> list[tuple[int, str]]:
        """See `Wire`."""
        for number in list(self._flying):
            if (flight := self._flying.get(number)) is not None:  # with one that fails its peer's others go
                self._step(number, lambda flight=flight: self._agent.check_xfer_state(flight.handle))  # type: ignore[misc]
        if self._flying:
            self._hurry(HASTE)
        elif self._ground.arrivals.all():
            self._hurry(WATCH)
        self._agent.get_new_notifs()  # there are none; it lets the library receive
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """See `Wire`."""
        for peer in list(self._names):
            self._disconnect(peer, "this server is closing")
        if self._memory is not None:
            self._agent.deregister_memory(self._memory)
        self._memory = self._agent = None

    # ---- inner ------------------------------------------------------------------------------------------------------------------

    def _start(self, flight: Flight, parts: np.ndarray) -> str:
        if flight.peer not in self._names:
            self._names[flight.peer] = self._agent.add_remote_agent(self._known[flight.peer]).decode()
        own, there = (self._agent.get_xfer_descs(_descriptors(parts[:, side], parts[:, 2]), "DRAM") for side in (0, 1))
        flight.handle = self._agent.initialize_xfer("WRITE", own, there, self._names[flight.peer])
        state: str = self._agent.transfer(flight.handle)
        return state

    def _step(self, number: int, act: Callable[[], str]) -> None:
        """Do something for a write, and see what has become of it."""
        try:
            state, reason = act(), "the transfer has failed"
        except ERRORS as error:
            state, reason = "ERR", str(error)
        if state == "PROC":
            return
        flight = self._flying.pop(number)
        self._ended.append((number, "" if state == "DONE" else f"NIXL: {reason}"))
        _release(flight)
        if state != "DONE":
            self._disconnect(flight.peer, f"NIXL: {reason}")

    def _disconnect(self, peer: str, reason: str) -> None:
        """Break off what is under way to a peer; the next write connects anew."""
        for number in [number for number, flight in self._flying.items() if flight.peer == peer]:
            _release(self._flying.pop(number))
            self._ended.append((number, reason))
        name = self._names.pop(peer, "")
        if name and name not in self._names.values():
            with contextlib.suppress(*ERRORS):
                self._agent.remove_remote_agent(name)

    def _hurry(self, seconds: float) -> None:
        self._ground.nap = min(self._ground.nap, seconds)


def _release(flight: Flight) -> None:
    """A handle that cannot be released now is kept by the library until it can."""
    if flight.handle is not None:
        with contextlib.suppress(*ERRORS):
            flight.handle.release()


def _descriptors(addresses: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return np.stack([addresses, sizes, np.zeros_like(sizes)], axis=1).astype(np.uint64)
