"""A request's way through the caches, in numbers: what was found, what was computed, what was sent, and how long each part took.

One record per request, made by the brain that answers the client: from its own books, and on a decode server from what the prefill server
told it with the first token. Plain data; shown in answers, kept for a while under the request's name, summed up in metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Journey"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """Tokens of the prompt: `prompt_tokens = decode_hit + prefill_hit + prefill_computed + local_computed`; a server that serves whole
    requests counts as a decode server. Times in milliseconds; `fallback`: why the decode server computed what another should have."""

    prompt_tokens: int
    decode_hit_tokens: int = 0  # were in the cache of the server that generates
    prefill_hit_tokens: int = 0  # came from the prefill server's cache
    prefill_computed_tokens: int = 0  # were computed by the prefill server
    local_computed_tokens: int = 0  # were computed by the server that generates
    pages_sent: int = 0
    bytes_raw: int = 0  # of KV that crossed
    bytes_wire: int = 0  # that it took on the wire
    queue_ms: float = 0.0  # until the first step that computed some of it, on whichever server
    reserve_ms: float = 0.0  # until the decode server had pages for it
    prefill_ms: float = 0.0  # from that first step to the first token
    visible_transfer_ms: float = 0.0  # from the first token's arrival until the last byte was there
    fallback: str = ""
