"""How busy a scheduler is, as one plain record: for `/metrics`, for the load balancer, for people."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LoadSnapshot", "Queues", "Totals"]


@dataclass(slots=True)
class Totals:
    """Counters that only grow. Token counts of prompts are taken when a request first gets its slot."""

    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0  # of those, found in the cache
    computed_tokens_total: int = 0  # prompt tokens computed, again after a retraction
    generated_tokens_total: int = 0
    retractions_total: int = 0
    retracted_input_tokens_total: int = 0  # prompt tokens of the requests that were retracted
    retracted_output_tokens_total: int = 0
    finished_total: int = 0
    aborted_total: int = 0
    execution_seconds_total: float = 0.0  # that the runner spent on steps
    bootstrap_failed_total: int = 0  # handoffs that ended before a page could be sent
    transfer_failed_total: int = 0  # handoffs that ended later, before the prompt was whole
    fallbacks_total: int = 0  # prompts that a decode server computed because a prefill server did not
    sent_pages_total: int = 0
    received_bytes_total: int = 0  # of KV
    wire_bytes_total: int = 0  # that it took to bring them


@dataclass(frozen=True, slots=True)
class Queues:
    """Requests of handoffs, by what they wait for."""

    prefill_prealloc: int = 0  # on a prefill server: no decode server has reserved pages
    prefill_inflight: int = 0  # computed, their last pages leave
    decode_prealloc: int = 0  # on a decode server: no pages yet
    decode_transfer: int = 0  # first token or KV is still to come


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """State is counted now, from the scheduler's own structures; totals only grow. Lengths in tokens unless named otherwise."""

    running: int = 0  # requests that hold a slot
    waiting: int = 0
    retracted: int = 0  # of the waiting: those that ran before and gave their pages back
    parked: int = 0
    grammar_queue: int = 0  # whose grammar is not ready
    pages: int = 0  # of the pool
    free_pages: int = 0
    tree_pages: int = 0
    locked_pages: int = 0  # of the tree's: pinned by a running request
    request_pages: int = 0
    quarantine_pages: int = 0  # that a peer may still write into, and nobody uses
    page_size: int = 16
    max_running: int = 0
    new_token_ratio: float = 0.0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    computed_tokens_total: int = 0
    generated_tokens_total: int = 0
    evicted_tokens_total: int = 0
    retractions_total: int = 0
    retracted_input_tokens_total: int = 0
    retracted_output_tokens_total: int = 0
    finished_total: int = 0
    aborted_total: int = 0
    execution_seconds_total: float = 0.0
    paused: bool = False  # no step is planned until somebody says so
    prefill_prealloc: int = 0
    prefill_inflight: int = 0
    decode_prealloc: int = 0
    decode_transfer: int = 0
    bootstrap_failed_total: int = 0
    transfer_failed_total: int = 0
    fallbacks_total: int = 0
    sent_pages_total: int = 0
    received_bytes_total: int = 0
    wire_bytes_total: int = 0

    @property
    def held(self) -> int:
        """Live requests that a pause holds up."""
        return self.running + self.waiting + self.parked if self.paused else 0

    @property
    def used_tokens(self) -> int:
        """Tokens of pages that a request owns or locks, or that are in quarantine; what the tree could give up counts as not used."""
        return (self.request_pages + self.locked_pages + self.quarantine_pages) * self.page_size

    @property
    def token_usage(self) -> float:
        """Share of the pool that is used."""
        return self.used_tokens / max(1, self.pages * self.page_size)

    @property
    def utilization(self) -> float:
        """Share in use of what is scarcer, slots or the pool."""
        return max(self.running / max(1, self.max_running), self.token_usage)

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that came from the cache."""
        return self.cached_tokens_total / self.prompt_tokens_total if self.prompt_tokens_total else 0.0
