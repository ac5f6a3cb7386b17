"""A request's way through the caches, in numbers: what was found, what was computed, what was sent, and how long each part took.

`Journey` is the record, one per request, made by the brain that answers the client: from its own books, and on a decode server from what
the prefill server told it with the first token. Plain data; shown in answers, kept for a while under the request's name, summed up in
metrics. `Trail` is the same while it happens. Invariant: each token of a prompt counts once, for whoever had it first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from radixpd.core.handoff import PrefillShare

__all__ = ["Journey", "Trail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """Tokens of the prompt: `prompt_tokens = decode_hit + prefill_hit + prefill_computed + local_computed`; a server that serves whole
    requests counts as a decode server. Of a request that ended before its prompt was whole: what there was of it by then. Times in
    milliseconds; `fallback`: why the decode server computed what another should have. `leg`: which half of a handoff this server was."""

    prompt_tokens: int
    decode_hit_tokens: int = 0  # were in the cache of the server that generates
    prefill_hit_tokens: int = 0  # came from the prefill server's cache
    prefill_computed_tokens: int = 0  # were computed by the prefill server
    local_computed_tokens: int = 0  # were computed by the server that generates
    recomputed_tokens: int = 0  # were computed there again, output too, because pages were given up (a retraction)
    pages_sent: int = 0
    bytes_raw: int = 0  # of KV that crossed; the receiver counts them
    bytes_wire: int = 0  # that it took on the wire
    queue_ms: float = 0.0  # until the first step that computed some of it, on whichever server
    reserve_ms: float = 0.0  # until the decode server had pages for it
    prefill_ms: float = 0.0  # from that first step to the first token
    transfer_ms: float = 0.0  # from the first page that the mover was given until the last byte was there
    visible_transfer_ms: float = 0.0  # of those, after the first token's arrival
    fallback: str = ""
    leg: Literal["", "prefill", "decode"] = ""


@dataclass(slots=True)
class Trail:
    """What is known of a journey. `covered`: tokens of the prompt that have been found, computed or brought, in whatever attempt; times in
    seconds."""

    covered: int = 0
    hit: int = 0  # found here
    computed: int = 0  # by this server
    again: int = 0
    brought: int = 0  # computed by a peer
    peer_hit: int = 0  # and what the peer had found
    skip: int | None = None  # on a prefill server: what the decode server has already
    pages: int = 0
    raw: int = 0
    wire: int = 0
    queued: float = -1.0  # -1: no step has computed any of it yet
    reserved: float = 0.0
    filled: float = 0.0
    transfer: float = 0.0
    visible: float = 0.0
    fallback: str = ""
    leg: Literal["", "prefill", "decode"] = ""

    @property
    def cached(self) -> int:
        """Prompt tokens that nobody computed for this request, as far as this server knows."""
        return self.hit + self.peer_hit

    def found(self, upto: int) -> None:
        """The prompt's first `upto` tokens were in the cache. What an earlier attempt had of them is no news."""
        self.hit += max(upto - self.covered, 0)
        self.covered = max(self.covered, upto)

    def ran(self, start: int, end: int, prompt: int) -> None:
        """Positions `start .. end - 1` of prompt and output have been computed here."""
        upto = min(end, prompt)
        fresh = max(upto - max(start, self.covered), 0)
        self.computed += fresh
        self.again += end - start - fresh
        self.covered = max(self.covered, upto)

    def landed(self, prompt: int, skip: int, share: PrefillShare) -> None:
        """The rest of the prompt has come from a peer, which found the first `share.hit` tokens in its cache."""
        self.found(skip)
        self.peer_hit = min(max(share.hit - skip, 0), prompt - skip)
        self.brought = prompt - skip - self.peer_hit
        self.covered = prompt
        self.pages, self.queued, self.filled = share.pages, share.queued, share.seconds

    def follow(self, first: Trail, prompt: int) -> None:
        """A further sample, whose prompt is that of sample 0: what the tree does not have of it was computed once for all."""
        rest, self.covered = prompt - self.covered, prompt
        if first.brought:
            self.brought += rest
        else:
            self.computed += rest
        self.fallback = first.fallback
        self.queued, self.reserved, self.filled = first.queued, first.reserved, first.filled
        self.transfer, self.visible = first.transfer, first.visible

    def journey(self, prompt: int) -> Journey:
        """The record, of a prompt of so many tokens."""
        hit, peer_hit, brought, computed, skip = self.hit, self.peer_hit, self.brought, self.computed, self.skip
        if skip is not None:
            # The decode server takes only what it lacks: what was done here for the beginning is not part of the way.
            hit, peer_hit, computed = skip, max(self.hit - skip, 0), 0
            brought = max(self.covered - max(self.hit, skip), 0)
        return Journey(
            prompt_tokens=prompt,
            decode_hit_tokens=hit,
            prefill_hit_tokens=peer_hit,
            prefill_computed_tokens=brought,
            local_computed_tokens=computed,
            recomputed_tokens=self.again,
            pages_sent=self.pages,
            bytes_raw=self.raw,
            bytes_wire=self.wire,
            queue_ms=_ms(max(self.queued, 0.0)),
            reserve_ms=_ms(self.reserved),
            prefill_ms=_ms(self.filled),
            transfer_ms=_ms(self.transfer),
            visible_transfer_ms=_ms(self.visible),
            fallback=self.fallback,
            leg=self.leg,
        )


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
