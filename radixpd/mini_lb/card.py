"""What a worker says of itself in `/server_info`, as far as routing needs it: which process it is, how it names pages, where it tells
of them.

Invariant: whatever a worker answers, reading it never fails; of servers that are not ours there is no card. An endpoint is taken only if it
can be the worker's: what it binds to on its own machine is looked for there, and nowhere else. Pure; called by `fleet`.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated

import msgspec
from yarl import URL

from radixpd.mini_lb.load_report import Count
from radixpd.mini_lb.snapshot import Role

__all__ = ["Card", "Endpoints", "Hashing", "read_card"]

ANY = ("*", "0.0.0.0", "[::]")


class _Events(msgspec.Struct):
    endpoint: str = ""
    replay_endpoint: str = ""
    topic: str = ""


class _Info(msgspec.Struct):
    incarnation: str
    model_fingerprint: str
    text_identity: str
    tokenizer_directory: str
    page_size: Count
    max_request_tokens: Count
    role: Role
    disaggregation_bootstrap_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    chat_template: str | None = None
    allow_auto_truncate: bool = False
    salt_from_key: bool = False
    kv_events: _Events | None = None


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where to hear of pages and where to ask for what was missed (empty: nowhere)."""

    live: str
    replay: str
    topic: str


@dataclass(frozen=True, slots=True)
class Hashing:
    """Workers for which all of this is equal give the same prompt the same page ids. `text`: identity of tokenizer and chat template."""

    fingerprint: str
    page_size: int
    text: str


@dataclass(frozen=True, slots=True)
class Card:
    """One process. `longest`: prompt and output of one request, in tokens; `truncates`: it cuts longer prompts; `apart`: each key is a
    tenant with a cache of its own."""

    incarnation: str
    role: Role
    bootstrap_port: int
    hashing: Hashing
    tokenizer_directory: str
    chat_template: str | None
    longest: int
    truncates: bool
    apart: bool
    events: Endpoints | None


_DECODER = msgspec.json.Decoder(_Info)


def read_card(body: bytes, worker: str) -> Card | None:
    """The card in an answer to `/server_info` of the worker with this URL; None if it is something else."""
    try:
        info = _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    # Until it is ready it does not know what its pages will be called.
    if not (info.incarnation and info.model_fingerprint) or info.page_size < 1:
        return None
    return Card(
        incarnation=info.incarnation,
        role=info.role,
        bootstrap_port=info.disaggregation_bootstrap_port,
        hashing=Hashing(info.model_fingerprint, info.page_size, info.text_identity),
        tokenizer_directory=info.tokenizer_directory,
        chat_template=info.chat_template,
        longest=info.max_request_tokens,
        truncates=info.allow_auto_truncate,
        apart=info.salt_from_key,
        events=_endpoints(info.kv_events, URL(worker).host or ""),
    )


def _endpoints(told: _Events | None, host: str) -> Endpoints | None:
    live = _seen_from_here(told.endpoint, host) if told is not None else ""
    return Endpoints(live, _seen_from_here(told.replay_endpoint, host), told.topic) if told is not None and live else None


def _seen_from_here(endpoint: str, host: str) -> str:
    """Where an endpoint that a worker at `host` binds is reached; empty if it is not."""
    kind, _, place = endpoint.partition("://")
    if kind == "ipc":
        return endpoint if _is_loopback(host) else ""
    bound, _, port = place.rpartition(":")
    if kind != "tcp" or not bound or not port.isascii() or not port.isdigit():
        return ""
    if bound in ANY:
        bound = f"[{host}]" if ":" in host else host
    elif _is_loopback(bound.strip("[]")) and not _is_loopback(host):
        return ""
    return f"tcp://{bound}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
