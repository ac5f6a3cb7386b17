"""Who may talk to whom between prefill and decode servers: the shared secret, the proofs of it, and where decode may call.

Invariant: the secret never leaves this module but as HMAC-SHA256 keys; what goes on the wire are MACs over both sides' fresh nonces and
over whole messages. It authenticates and protects from alteration; it hides nothing: what is said can be read on the way. Without a secret
the same code runs with a key that everybody knows, and only loopback addresses count. Called by the other `peer_*` files; `load_secret` at
start, `contact` also at the door for a request's `bootstrap_host`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from radixpd.config.secret import Secret
from radixpd.errors import BadRequest, ConfigError

__all__ = [
    "FLAG", "VARIABLE", "SessionKeys", "contact", "endpoint", "is_loopback", "load_secret", "main_key", "proof", "rooms_key", "same",
    "seal", "session_keys",
]  # fmt: skip

VARIABLE = "RADIXPD_DISAGGREGATION_SECRET"
FLAG = "--disaggregation-secret-file"
LEAST = 16  # bytes
MOST = 4096

NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,251}[a-z0-9])?")


def load_secret(path: str, environment: Mapping[str, str]) -> Secret | None:
    """The secret of this server, None if it has none; `path` goes before the environment. A final line end does not count."""
    if path:
        where, data = f"{FLAG} {path}", _read(path)
    elif VARIABLE in environment:
        where, data = f"environment variable {VARIABLE}", environment[VARIABLE].encode("utf-8", "surrogateescape")
    else:
        return None
    data = data.rstrip(b"\r\n")
    if len(data) < LEAST:
        raise ConfigError(f"{where}: the secret has {len(data)} bytes; at least {LEAST} are needed")
    return Secret(data.decode("utf-8", "surrogateescape"))


def _read(path: str) -> bytes:
    try:
        # NONBLOCK: a FIFO without a writer must not hold up the start.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{FLAG} {path}: not a regular file")
            if found.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
                raise ConfigError(f"{FLAG} {path}: others may read or change it (mode {stat.S_IMODE(found.st_mode):03o}); chmod 600 it")
            data = os.read(handle, MOST + 1)
        finally:
            os.close(handle)
    except OSError as error:
        raise ConfigError(f"{FLAG} {path}: {error.strerror}") from None
    if len(data) > MOST:
        raise ConfigError(f"{FLAG} {path}: more than {MOST} bytes")
    return data


def main_key(secret: Secret | None) -> bytes:
    """The key that all others come from."""
    purpose = "radixpd prefill/decode control"
    return bytes.fromhex((secret or Secret("")).digest(purpose))


def _mac(key: bytes, *parts: bytes) -> bytes:
    """Over all parts, each with its length: no two lists of parts look alike."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(struct.pack("<Q", len(part)))
        mac.update(part)
    return mac.digest()


def same(one: bytes, other: bytes) -> bool:
    """Compared in a time that does not tell where they differ."""
    return hmac.compare_digest(one, other)


def proof(key: bytes, role: str, caller: bytes, door: bytes) -> bytes:
    """Whoever makes this knows the secret, in this very handshake: `caller` and `door` are both encoded `Hello`s with fresh nonces."""
    return _mac(key, b"proof", role.encode(), caller, door)


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """One session's name and its two keys, one for each direction."""

    session: bytes
    own: bytes
    theirs: bytes

    def __repr__(self) -> str:
        return f"SessionKeys({self.session.hex()})"


def session_keys(key: bytes, caller: bytes, door: bytes, *, calling: bool) -> SessionKeys:
    """Both sides derive the same from the same handshake."""
    outward, inward = (_mac(key, b"session", direction, caller, door) for direction in (b"from caller", b"from door"))
    session = _mac(key, b"session name", caller, door)[:16]
    return SessionKeys(session, outward, inward) if calling else SessionKeys(session, inward, outward)


def rooms_key(key: bytes, caller: bytes, door: bytes) -> bytes:
    """For tokens of data connections between two processes, by their incarnations: the same in every session of theirs."""
    return _mac(key, b"rooms", caller, door)


def seal(key: bytes, session: bytes, incarnation: bytes, numbers: tuple[int, int, int], body: bytes) -> bytes:
    """The MAC of one `Sealed`; `numbers`: counter, ack, number."""
    return _mac(key, b"message", session, incarnation, struct.pack("<QQQ", *numbers), body)


# ---- addresses ------------------------------------------------------------------------------------------------------------------


def is_loopback(address: str) -> bool:
    """Whether this numeric address is of this machine alone."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def contact(host: str, port: int, *, allowed: Iterable[str], secured: bool) -> str:
    """The peer's name, `host:port`, if decode may call it. `allowed`: hosts or host:ports of `--disaggregation-peers`, none: any."""
    name = _host(host)
    if not 1 <= port <= 65_535:
        raise BadRequest(f"bootstrap_port must be between 1 and 65535, not {port}", param="bootstrap_port")
    shown = f"[{name}]" if ":" in name else name
    peer = f"{shown}:{port}"
    wanted = [each.lower() for each in allowed]
    if wanted and not {name, shown, peer} & {*wanted}:
        raise BadRequest(f"bootstrap_host {peer} is none of --disaggregation-peers", param="bootstrap_host")
    if not secured and name != "localhost" and not is_loopback(name):
        raise BadRequest(
            f"bootstrap_host {peer} is not a loopback address, and without a secret ({FLAG} or {VARIABLE}) only those are called",
            param="bootstrap_host",
        )
    return peer


def endpoint(peer: str) -> str:
    """Where ZMQ connects to for a name that `contact` has made."""
    return f"tcp://{peer}"


def _host(host: str) -> str:
    name = host.lower()
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    try:
        if ":" in name:
            return str(ipaddress.IPv6Address(name))
    except ValueError:
        pass
    else:
        if NAME.fullmatch(name):
            return name
    raise BadRequest("bootstrap_host must be a host name or an IP address", param="bootstrap_host")
