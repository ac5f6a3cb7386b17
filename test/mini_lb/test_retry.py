"""When a request may be tried again."""

from __future__ import annotations

from radixpd.mini_lb.retry import RESERVE, Retries
from radixpd.mini_lb.settings import RetrySettings


def retries(**settings) -> Retries:
    return Retries(RetrySettings(**settings), lambda low, high: high)


def test_so_many_tries_and_no_more() -> None:
    rules = retries(retry_max_retries=2)
    assert [rules.again(done, sent=False) for done in (1, 2, 3)] == [True, True, False]


def test_only_what_reached_a_worker_draws_on_the_budget() -> None:
    rules = retries(retry_budget=0.5)
    assert all(rules.again(1, sent=False) for _ in range(1000))
    assert sum(rules.again(1, sent=True) for _ in range(1000)) == RESERVE
    for _ in range(4):
        rules.arrived()
    assert sum(rules.again(1, sent=True) for _ in range(10)) == 2


def test_the_budget_does_not_pile_up() -> None:
    rules = retries()
    for _ in range(10_000):
        rules.arrived()
    assert sum(rules.again(1, sent=True) for _ in range(1000)) == RESERVE


def test_waits_double_up_to_the_longest() -> None:
    rules = retries(retry_initial_backoff_ms=10, retry_max_backoff_ms=50)
    assert [rules.wait(done) for done in (1, 2, 3, 4, 99)] == [0.01, 0.02, 0.04, 0.05, 0.05]


def test_statuses() -> None:
    rules = retries()
    assert [status for status in range(100, 600) if rules.covers(status)] == [502, 503]
