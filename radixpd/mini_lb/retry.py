"""When a request may be tried again, and after which wait.

Only before the first byte of an answer. A try that never reached its worker costs nothing and may always be repeated elsewhere; one that
did draws on a budget, a share of all requests, so that a fault is not multiplied by everybody's second tries. Pure; called by the proxy.
"""

from __future__ import annotations

from collections.abc import Callable

from radixpd.mini_lb.settings import RetrySettings

__all__ = ["Retries"]

RESERVE = 10.0  # tries that the budget saves up, and starts with


class Retries:
    """The rules, and the budget of one load balancer. `uniform(low, high)` draws the jitter."""

    def __init__(self, settings: RetrySettings, uniform: Callable[[float, float], float]) -> None:
        self._settings = settings
        self._uniform = uniform
        self._budget = RESERVE

    def covers(self, status: int) -> bool:
        """Whether a worker's answer with this status is worth a try elsewhere."""
        return status in self._settings.retry_status_codes

    def arrived(self) -> None:
        """A new request: it earns its share of a second try."""
        self._budget = min(RESERVE, self._budget + self._settings.retry_budget)

    def again(self, done: int, *, sent: bool) -> bool:
        """Whether one more try may follow `done` tries. `sent`: the worker may have begun to compute."""
        if done > self._settings.retry_max_retries:
            return False
        if not sent:
            return True
        if self._budget < 1:
            return False
        self._budget -= 1
        return True

    def wait(self, done: int) -> float:
        """Seconds before the try that follows `done` tries."""
        longest = min(self._settings.retry_max_backoff_ms, self._settings.retry_initial_backoff_ms * 2.0 ** min(done - 1, 60))
        return self._uniform(0.5, 1.0) * longest / 1e3
