"""The one place that knows what `--disaggregation-mode` means: which role the brain gets, what requests may name, who this server is.

Everything else is handed the objects made here. Pure but for the host's name; no torch. Called by the API process (`room_rule_of`) and by
the scheduler process.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from radixpd.config.disaggregation import transfer_dtypes
from radixpd.config.resolve import Resolved
from radixpd.core.decode_role import DecodeRole
from radixpd.core.handoff import HandoffLimits
from radixpd.core.prefill_role import PrefillRole
from radixpd.core.roles import Aggregated, MakeRole
from radixpd.runtime.messages import RunnerReady
from radixpd.runtime.peer_line import Identity
from radixpd.runtime.peer_messages import Layout
from radixpd.runtime.rooms import RoomRule, room_rule

__all__ = [
    "WHOLE", "bind_of", "has_peers", "identity_of", "limits_of_handoffs", "make_role", "mode_of", "reachable_host", "room_rule_of",
    "with_mode", "writes_of",
]  # fmt: skip

WHOLE = "null"  # the mode of a server that serves requests from prompt to last token
WILDCARD = re.compile(r"|\*|0\.0\.0\.0|::|\[::\]")

ROLES: dict[str, Callable[[HandoffLimits], MakeRole]] = {
    WHOLE: lambda limits: Aggregated,
    "prefill": lambda limits: partial(PrefillRole, limits=limits),
    "decode": lambda limits: partial(DecodeRole, limits=limits),
}


def mode_of(resolved: Resolved) -> str:
    """As the server was started."""
    return resolved.settings.disaggregation.disaggregation_mode


def has_peers(resolved: Resolved) -> bool:
    """Whether this server is one half of a pair."""
    return mode_of(resolved) != WHOLE


def make_role(mode: str, resolved: Resolved) -> MakeRole:
    """What the scheduler does with a request before and after its prompt is computed."""
    return ROLES[mode](limits_of_handoffs(resolved))


def room_rule_of(mode: str, resolved: Resolved) -> RoomRule:
    """What requests may say of rooms."""
    settings = resolved.settings.disaggregation
    return room_rule(mode, allowed=settings.disaggregation_peers, secured=resolved.peer_secret is not None)


def limits_of_handoffs(resolved: Resolved) -> HandoffLimits:
    """The deadlines and bounds of handoffs, as flags say."""
    settings = resolved.settings.disaggregation
    local = settings.disaggregation_local_prefill_tokens
    return HandoffLimits(
        body=settings.disaggregation_bootstrap_timeout,
        reserve=settings.disaggregation_reserve_timeout,
        transfer=settings.disaggregation_transfer_timeout,
        local_tokens=resolved.page_size if local is None else local,
        fallback=settings.disaggregation_fallback == "local",
        codec=settings.disaggregation_transfer_dtype,
        overlap=not settings.disaggregation_disable_overlap,
    )


def reachable_host(resolved: Resolved) -> str:
    """The address that other servers are told, as it stands before a port: IPv6 in brackets."""
    host = resolved.settings.disaggregation.disaggregation_advertise_host or resolved.settings.server.host
    if WILDCARD.fullmatch(host):
        return socket.gethostname()
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def bind_of(mode: str, resolved: Resolved) -> tuple[str, int] | None:
    """Where decode servers knock; only prefill servers have a door."""
    if mode != "prefill":
        return None
    return resolved.settings.server.host, resolved.settings.disaggregation.disaggregation_bootstrap_port


def writes_of(mode: str) -> bool:
    """Whether it writes into its peers' pools; else they write into its own."""
    return mode == "prefill"


def with_mode(resolved: Resolved, mode: str) -> Resolved:
    """The same server in another role."""
    settings = resolved.settings
    return replace(resolved, settings=replace(settings, disaggregation=replace(settings.disaggregation, disaggregation_mode=mode)))


def identity_of(mode: str, resolved: Resolved, ready: RunnerReady) -> Identity:
    """Who this server is to its peers, once its runner has said what it holds."""
    return Identity(
        role=mode,
        name=f"{reachable_host(resolved)}:{resolved.settings.server.port}",
        model=ready.fingerprint,
        layout=Layout(**ready.layout),
        tp=resolved.settings.engine.tp_size,
        codecs=transfer_dtypes(resolved.settings.disaggregation.disaggregation_transfer_dtype),
        offers=ready.endpoints,
    )
