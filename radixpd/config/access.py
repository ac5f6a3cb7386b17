"""What must hold between the settings of who may call this server: keys, tenants, origins.

Pure. Invariant: whatever passes can work: a key here is one that a client can send, an origin one that a browser sends. Messages never
show a key. Called by `config.resolve`.
"""

from __future__ import annotations

import re

from radixpd.config.settings import ServerSettings
from radixpd.errors import ConfigError

__all__ = ["access_notes", "check_access"]

LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|::1")
ORIGIN = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


def check_access(server: ServerSettings) -> None:
    """Raise `ConfigError` for keys or origins that could never match, or that contradict each other."""
    for flag, keys in (("--api-key", server.api_key), ("--admin-api-key", server.admin_api_key)):
        if not all(re.fullmatch(r"[\x21-\x7e]+", key.reveal()) for key in keys):
            raise ConfigError(f"{flag}: a key holds a space, a control character or one outside ASCII: no client can send it")
    if not {*server.admin_api_key}.isdisjoint(server.api_key):
        raise ConfigError("an --admin-api-key is also an --api-key: give administrators keys of their own")
    if server.salt_from_key and not server.api_key:
        raise ConfigError("--salt-from-key needs keys to tell tenants apart: give --api-key")
    for origin in server.allowed_origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--allowed-origins {origin}: give * or what a browser sends: http(s)://host or http(s)://host:port, in lower case, "
                "without a path"
            )


def access_notes(server: ServerSettings) -> tuple[str, ...]:
    """What an operator may not have meant, as lines for the log."""
    notes = []
    if not server.api_key and not LOOPBACK.fullmatch(server.host):
        notes.append(f"--host {server.host} without --api-key: whoever reaches this address may use the server")
    if server.salt_from_key and not server.admin_api_key:
        notes.append("--salt-from-key without --admin-api-key: every key may flush the cache, pause the server and read /metrics")
    return tuple(notes)
