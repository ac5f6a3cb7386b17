"""Which room a request names with `bootstrap_host`, `bootstrap_port` and `bootstrap_room`: SGLang's contract for routers of P/D groups.

A router sends the same body to a prefill and a decode server. One small object per role reads the three fields; without any of them a
request is served whole, whatever the role. Invariant: a `Room` that a rule returns is one that its scheduler may open: the number is in
range, and decode calls no peer that `peer_trust` forbids. Made where the server's role is chosen, called by `admission`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from radixpd.core.handoff import Room
from radixpd.errors import BadRequest
from radixpd.runtime.peer_trust import contact

__all__ = ["MAX_HOST", "MAX_ROOM", "NO_ROOMS", "PORT", "DecodeRooms", "NoRooms", "PrefillRooms", "RoomRule", "room_rule", "rooms_named"]

PORT = 8998  # of a prefill server, where a request does not say
MAX_ROOM = 2**63 - 1
MAX_HOST = 253  # characters, as in DNS
MAX_NAMED = 4096  # rooms of one body that is refused
FIELDS = tuple[str | None, Annotated[int, Meta(ge=0, le=65535)] | None, Annotated[int, Meta(ge=0, le=MAX_ROOM)]]  # of one room


class RoomRule(Protocol):
    """`read`: whether the three fields may be given at all."""

    @property
    def read(self) -> bool: ...

    def room(self, host: str | None, port: int | None, number: int | None) -> Room | None:
        """The room of one prompt, None where it names none; values are in range, null is absent."""
        ...


@dataclass(frozen=True, slots=True)
class NoRooms:
    """A server that does both parts of every request: it would never hear of a room again."""

    read: bool = False

    def room(self, host: str | None, port: int | None, number: int | None) -> Room | None:
        for name, value in (("bootstrap_host", host), ("bootstrap_port", port), ("bootstrap_room", number)):
            if value is not None:
                raise BadRequest(
                    f"{name}: this server does not split prefill and decode; start it with --disaggregation-mode prefill or decode",
                    param=name,
                    code="unsupported_field",
                )
        return None


@dataclass(frozen=True, slots=True)
class PrefillRooms:
    """Decode comes to this server: only the number counts."""

    read: bool = True

    def room(self, host: str | None, port: int | None, number: int | None) -> Room | None:
        _check_length(host)
        if number is not None:
            return Room(number)
        if host is None and port is None:
            return None
        raise _missing("bootstrap_room", "bootstrap_host" if host is not None else "bootstrap_port")


@dataclass(frozen=True, slots=True)
class DecodeRooms:
    """This server calls prefill. `allowed`: `--disaggregation-peers`; `secured`: whether this server has a secret."""

    allowed: tuple[str, ...] = ()
    secured: bool = False
    read: bool = True

    def room(self, host: str | None, port: int | None, number: int | None) -> Room | None:
        _check_length(host)
        if host is None and port is None and number is None:
            return None
        if number is None:
            raise _missing("bootstrap_room", "bootstrap_host" if host is not None else "bootstrap_port")
        if host is None:
            raise _missing("bootstrap_host", "bootstrap_room")
        return Room(number, contact(host, PORT if port is None else port, allowed=self.allowed, secured=self.secured))


NO_ROOMS = NoRooms()


def room_rule(role: str, *, allowed: tuple[str, ...] = (), secured: bool = False) -> RoomRule:
    """The rule of a server with this role."""
    rules: dict[str, RoomRule] = {"null": NO_ROOMS, "prefill": PrefillRooms(), "decode": DecodeRooms(allowed, secured)}
    return rules[role]


def rooms_named(fields: Sequence[Any], count: int, rule: RoomRule) -> Iterator[Room]:
    """The rooms that a body of `count` prompts names, as far as that makes sense: it is refused, and anything may be wrong with it."""
    host, port, number = fields
    if type(number) is int:
        number = [number + index for index in range(count)]
    for index, each in enumerate(number[:MAX_NAMED] if isinstance(number, list) else ()):
        try:
            room = rule.room(*msgspec.convert((_at(host, index), _at(port, index), each), FIELDS))
        except (BadRequest, msgspec.ValidationError):
            continue
        if room is not None:
            yield room


def _at(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list) and index < len(value) else value


def _check_length(host: str | None) -> None:
    if host is not None and not 1 <= len(host) <= MAX_HOST:
        raise BadRequest(f"bootstrap_host must have between 1 and {MAX_HOST} characters, got {len(host)}", param="bootstrap_host")


def _missing(name: str, given: str) -> BadRequest:
    return BadRequest(f"{name} is missing: it goes with {given}", param=name)
