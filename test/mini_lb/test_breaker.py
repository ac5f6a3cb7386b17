"""A circuit under a clock of the test's own."""

from __future__ import annotations

import random

from radixpd.mini_lb.breaker import Breaker, BreakerRules, State

RULES = BreakerRules(failures=3, successes=2, seconds=10.0, most=60.0)


def breaker(rules: BreakerRules = RULES) -> Breaker:
    return Breaker(rules, lambda low, high: 1.0)


def fail(circuit: Breaker, now: float, times: int = 1) -> None:
    for _ in range(times):
        circuit.end(circuit.begin(now), False, now)


def trial(circuit: Breaker, now: float) -> None:
    assert circuit.allows(now)
    ticket = circuit.begin(now)
    assert not circuit.allows(now)
    circuit.end(ticket, True, now)


def test_failures_in_a_row_open_it() -> None:
    circuit = breaker()
    fail(circuit, 0, 2)
    circuit.end(circuit.begin(0), True, 0)
    fail(circuit, 0, 2)
    assert circuit.allows(0)
    fail(circuit, 0)
    assert circuit.state(0) is State.OPEN
    assert not circuit.allows(0)
    assert not circuit.allows(9.99)


def test_what_tells_nothing_counts_neither_way() -> None:
    circuit = breaker()
    fail(circuit, 0, 2)
    circuit.end(circuit.begin(0), None, 0)
    fail(circuit, 0)
    assert circuit.state(0) is State.OPEN


def test_one_trial_at_a_time_until_enough_have_been_answered() -> None:
    circuit = breaker()
    fail(circuit, 0, 3)
    assert circuit.state(10) is State.HALF_OPEN
    trial(circuit, 10)
    assert circuit.state(10) is State.HALF_OPEN
    trial(circuit, 11)
    assert circuit.state(11) is State.CLOSED
    assert circuit.transitions == 3


def test_a_long_stream_is_a_good_trial_from_its_first_byte() -> None:
    circuit = breaker()
    fail(circuit, 0, 3)
    tickets = []
    for _ in range(2):
        assert circuit.allows(10)
        tickets.append(circuit.begin(10))
        circuit.answered(tickets[-1])
    assert circuit.state(10) is State.CLOSED
    # One that then breaks counts as any other failure, but not against the new state.
    circuit.end(tickets[0], False, 20)
    assert circuit.state(20) is State.CLOSED


def test_a_failed_trial_opens_it_for_longer() -> None:
    circuit = breaker()
    fail(circuit, 0, 3)
    fail(circuit, 10)
    assert not circuit.allows(29.9)
    assert circuit.allows(30)
    fail(circuit, 30)
    assert not circuit.allows(69.9)
    fail(circuit, 70)
    assert not circuit.allows(70 + 59.9)  # not 80: the longest wait is 60
    assert circuit.allows(70 + 60)
    trial(circuit, 130)
    trial(circuit, 130)
    fail(circuit, 200, 3)
    assert circuit.allows(210)  # a circuit that was closed begins with the first wait again


def test_a_trial_whose_client_hangs_up_makes_room_for_the_next() -> None:
    circuit = breaker()
    fail(circuit, 0, 3)
    circuit.end(circuit.begin(10), None, 10)
    assert circuit.state(10) is State.HALF_OPEN
    assert circuit.allows(10)


def test_a_burst_that_fails_together_opens_it_once() -> None:
    circuit = breaker()
    burst = [circuit.begin(0) for _ in range(20)]
    for ticket in burst:
        circuit.end(ticket, False, 1)
    assert circuit.transitions == 1
    assert circuit.allows(11)


def test_late_news_of_an_earlier_state_does_not_count() -> None:
    circuit = breaker()
    old = circuit.begin(0)
    fail(circuit, 0, 3)
    ticket = circuit.begin(10)
    circuit.end(old, False, 10)
    assert circuit.state(10) is State.HALF_OPEN
    circuit.end(ticket, True, 10)
    trial(circuit, 10)
    assert circuit.state(10) is State.CLOSED


def test_a_new_process_starts_with_a_closed_circuit() -> None:
    circuit = breaker()
    fail(circuit, 0, 3)
    circuit.reset()
    assert circuit.allows(0)
    fail(circuit, 0, 2)
    assert circuit.allows(0)


def test_waits_are_spread() -> None:
    waits = set()
    for seed in range(20):
        circuit = Breaker(RULES, random.Random(seed).uniform)
        fail(circuit, 0, 3)
        waits.add(next(step for step in range(200) if circuit.allows(step / 10)))
    assert min(waits) >= 80
    assert max(waits) <= 120
    assert len(waits) > 10
