"""The fair queue: order within a tenant, a bound between tenants, and a full queue that the flooder pays for."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from radixpd.mini_lb.fair_queue import FairQueue


def test_one_tenant_is_served_in_order() -> None:
    queue: FairQueue[int] = FairQueue(100)
    for item in range(10):
        assert queue.push("a", item) is None
    assert [queue.pop() for _ in range(11)] == [*range(10), None]


def test_a_flood_does_not_delay_another_tenant() -> None:
    queue: FairQueue[str] = FairQueue(10_000)
    for number in range(5000):
        queue.push("flood", f"f{number}")
    for _ in range(100):
        queue.pop()
    queue.push("quiet", "q0")
    queue.push("quiet", "q1")
    served = [queue.pop() for _ in range(5)]
    assert served.index("q0") <= 1
    assert served.index("q1") <= 3


def test_tenants_share_by_cost() -> None:
    """Requests of cost 4 get a turn for every four of cost 1."""
    queue: FairQueue[str] = FairQueue(1000)
    for _ in range(200):
        queue.push("long", "long", cost=4.0)
        queue.push("short", "short", cost=1.0)
    counts = Counter(queue.pop() for _ in range(100))
    assert 3.5 < counts["short"] / counts["long"] < 4.5


def test_idleness_earns_no_credit() -> None:
    """Who was away does not get all his missed turns at once."""
    queue: FairQueue[str] = FairQueue(1000)
    for _ in range(40):
        queue.push("steady", "s")
    for _ in range(20):
        queue.pop()  # never empty: the turns go on
    for _ in range(20):
        queue.push("back", "b")
    counts = Counter(queue.pop() for _ in range(20))
    assert abs(counts["b"] - counts["s"]) <= 2


def test_when_it_is_full_the_longest_line_loses_its_newest() -> None:
    queue: FairQueue[str] = FairQueue(4)
    for number in range(4):
        queue.push("flood", f"f{number}")
    assert queue.push("quiet", "q0") == "f3"
    assert queue.push("flood", "f4") == "f4"  # the newcomer is the flooder's
    assert queue.push("quiet", "q1") == "f2"
    assert queue.push("quiet", "q2") == "q2"  # one and three would be no better than three and one
    assert queue.waiting() == {"flood": 2, "quiet": 2}
    assert [queue.pop() for _ in range(5)] == ["f0", "q0", "f1", "q1", None]


def test_those_who_left_are_passed_over() -> None:
    queue: FairQueue[str] = FairQueue(10)
    for item in ("a0", "a1", "a2"):
        queue.push("a", item)
    queue.push("b", "b0")
    assert queue.remove("a", "a0")
    assert not queue.remove("a", "a0")
    assert not queue.remove("c", "c0")
    assert sorted(str(queue.pop()) for _ in range(3)) == ["a1", "a2", "b0"]
    assert queue.pop() is None


def test_tenants_that_come_once_leave_nothing() -> None:
    queue: FairQueue[int] = FairQueue(10)
    for number in range(5000):
        queue.push(f"tenant {number}", number)
        queue.pop()
    assert len(queue._tenants) == len(queue._heads) == 0
    queue.push("steady", -1)
    for number in range(5000):
        queue.push("steady", number)
        queue.push(f"tenant {number}", number)
        queue.pop()
        queue.pop()
        assert len(queue) == 1
        assert len(queue._tenants) < 200


STEPS = st.lists(st.tuples(st.sampled_from(["push", "push", "pop", "remove"]), st.sampled_from("abc")), max_size=120)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.integers(1, 12), st.integers(0, 2**16))
def test_every_item_leaves_exactly_once(steps: list[tuple[str, str]], most: int, seed: int) -> None:
    draw = random.Random(seed)
    queue: FairQueue[tuple[str, int]] = FairQueue(most)
    waiting: dict[str, list[tuple[str, int]]] = {"a": [], "b": [], "c": []}
    for number, (step, tenant) in enumerate(steps):
        if step == "push":
            item = (tenant, number)
            gone = queue.push(tenant, item, cost=draw.choice((0.5, 1.0, 3.0)))
            waiting[tenant].append(item)
            if gone is not None:
                assert gone == waiting[gone[0]].pop()  # the newest of its line
        elif step == "pop":
            served = queue.pop()
            assert (served is None) == (not any(waiting.values()))
            if served is not None:
                assert waiting[served[0]].pop(0) == served
        elif waiting[tenant]:
            item = draw.choice(waiting[tenant])
            waiting[tenant].remove(item)
            assert queue.remove(tenant, item)
        assert len(queue) == sum(map(len, waiting.values())) <= most


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**16), st.integers(1, 6), st.integers(1, 400))
def test_the_head_of_an_empty_line_waits_for_at_most_one_of_each_other_tenant(seed: int, tenants: int, flood: int) -> None:
    """Costs are equal here; the promise of the module."""
    draw = random.Random(seed)
    queue: FairQueue[str] = FairQueue(10**6)
    for _ in range(flood):
        queue.push(f"other {draw.randrange(tenants)}", "other")
    for _ in range(draw.randrange(flood)):
        queue.pop()
    queue.push("new", "new")
    passed = 0
    while queue.pop() != "new":
        passed += 1
    assert passed <= tenants
