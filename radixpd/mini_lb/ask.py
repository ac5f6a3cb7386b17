"""What the balancer must know of a request's body, and the one thing that it adds: the rooms of a handoff.

Only the names that matter are read; the rest of the body passes byte for byte, so numbers and unknown fields arrive as they were written.
Invariant: rooms cannot be guessed and are drawn anew for every try; a body that names rooms itself is refused, since a client must not
choose whom the servers call. Pure but for the draw; called by the proxy and `pd`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import msgspec

from radixpd.errors import BadRequest
from radixpd.mini_lb.snapshot import RouteAsk

__all__ = ["Ask", "Contact", "read_ask", "with_rooms"]

ROOM_BITS = 63
MOST_PROMPTS = 4096  # as the servers allow
PROMPTS = ("text", "input_ids", "prompt", "messages")
TOKEN_BYTES = 4  # a guess, until the balancer tokenizes itself
ABSENT = msgspec.Raw()


class _Body(msgspec.Struct):
    """Names that matter; values stay as they were written."""

    text: msgspec.Raw = ABSENT  # /generate
    input_ids: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT  # /v1/completions
    messages: msgspec.Raw = ABSENT  # /v1/chat/completions
    stream: msgspec.Raw = ABSENT
    user: msgspec.Raw = ABSENT
    cache_salt: msgspec.Raw = ABSENT
    extra_key: msgspec.Raw = ABSENT
    bootstrap_host: msgspec.Raw = ABSENT
    bootstrap_port: msgspec.Raw = ABSENT
    bootstrap_room: msgspec.Raw = ABSENT


@dataclass(frozen=True, slots=True)
class Ask:
    """A body, how many prompts it holds (None where they do not come in a list), and what the policies see of it."""

    body: bytes
    route: RouteAsk
    prompts: int | None = None


@dataclass(frozen=True, slots=True)
class Contact:
    """Where a decode server finds the prefill server of a request."""

    host: str
    port: int


_DECODER = msgspec.json.Decoder(_Body)
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


def read_ask(body: bytes, *, rid: str = "", session: str = "") -> Ask:
    """Read a request's body; `BadRequest` if it is no JSON object, or names rooms."""
    try:
        found = _DECODER.decode(body)
        given = {name: raw for name in found.__struct_fields__ if (raw := bytes(getattr(found, name))) not in (b"", b"null")}
        of = next((name for name in PROMPTS if name in given), "")
        prompt = given.get(of, b"")
        count = _prompts(prompt)
        user = msgspec.json.decode(given.get("user", b'""'))
    except msgspec.ValidationError:
        raise BadRequest("the body must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
        if name in given:
            raise BadRequest(f"{name} is for the load balancer to set", param=name)
    if count is not None and count > MOST_PROMPTS:
        raise BadRequest(f"{of} may hold {MOST_PROMPTS} prompts, got {count}", param=of)
    route = RouteAsk(
        rid=rid,
        tokens=len(prompt) // TOKEN_BYTES + 1,
        prompt=prompt,
        namespace=b"\0".join(given.get(name, b"") for name in ("cache_salt", "extra_key")),
        user=user if isinstance(user, str) else "",
        session=session or (user if isinstance(user, str) else ""),
        stream=given.get("stream") == b"true",
    )
    return Ask(body, route, count)


def _prompts(value: bytes) -> int | None:
    """How many prompts a text, a list of ids, or a list of either is."""
    if not value.startswith(b"["):
        return None
    items = _ITEMS.decode(value)
    return len(items) if items and bytes(items[0]).startswith((b'"', b"[")) else None


def with_rooms(ask: Ask, contact: Contact) -> bytes:
    """The body with the three fields that make two servers one: a value for one prompt, lists for a batch."""
    count = ask.prompts
    rooms = [secrets.randbits(ROOM_BITS) for _ in range(count or 1)]
    values = {
        "bootstrap_host": contact.host if count is None else [contact.host] * count,
        "bootstrap_port": contact.port if count is None else [contact.port] * count,
        "bootstrap_room": rooms[0] if count is None else rooms,
    }
    inside = ask.body.rstrip()[:-1].rstrip()
    # An object's last name wins: these stand behind whatever was there.
    return inside + (b"" if inside.endswith(b"{") else b",") + msgspec.json.encode(values)[1:]
