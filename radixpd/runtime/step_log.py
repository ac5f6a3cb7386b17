"""The scheduler's log lines about steps, in the words that SGLang users grep for.

One line per prefill step, one per `--decode-log-interval` decode steps, one per retraction. Invariant: an idle server writes nothing, and
idle time does not count into the throughput. Called by the scheduler process after each plan.
"""

from __future__ import annotations

import logging

from radixpd.core.load import LoadSnapshot
from radixpd.core.plan_builder import StepStats
from radixpd.core.scheduler import Scheduler

__all__ = ["StepLog"]

logger = logging.getLogger(__name__)


class StepLog:
    """Counts decode steps and the tokens between two of their lines."""

    def __init__(self, decode_interval: int) -> None:
        self._interval = decode_interval
        self._decode_steps = 0
        self._since: tuple[float, int] | None = None  # time and generated tokens at the last decode line, or at the end of idleness

    def planned(self, scheduler: Scheduler, now: float) -> None:
        """Report the plan that was just made."""
        stats = scheduler.last_step
        if self._since is None:
            self._since = now, scheduler.load().generated_tokens_total
        if stats.retracted:
            load = scheduler.load()
            logger.warning(
                "KV cache pool is full. Retract requests. #retracted_reqs: %d, #new_token_ratio: %.4f, #queue-req: %d",
                stats.retracted,
                load.new_token_ratio,
                stats.waiting,
            )
        if stats.new_tokens:
            self._prefill(stats, scheduler.load())
        elif stats.decode_rows:
            self._decode_steps += 1
            if self._decode_steps % self._interval == 0:
                self._decode(stats, scheduler.load(), now)

    def idle(self) -> None:
        """Nothing is in flight."""
        self._since = None

    def _prefill(self, stats: StepStats, load: LoadSnapshot) -> None:
        logger.info(
            "Prefill batch. #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, #running-req: %d, #queue-req: %d",
            stats.new_sequences,
            stats.new_tokens,
            stats.cached_tokens,
            load.token_usage,
            stats.running,
            stats.waiting,
        )

    def _decode(self, stats: StepStats, load: LoadSnapshot, now: float) -> None:
        assert self._since is not None
        started, generated = self._since
        rate = (load.generated_tokens_total - generated) / max(now - started, 1e-9)
        self._since = now, load.generated_tokens_total
        logger.info(
            "Decode batch. #running-req: %d, #token: %d, token usage: %.2f, gen throughput (token/s): %.2f, #queue-req: %d",
            stats.running,
            load.used_tokens,
            load.token_usage,
            rate,
            stats.waiting,
        )
