"""Staging memory: spans never overlap, nobody is overtaken, what is given back is whole again."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from radixpd.kv.staging import Staging


def test_spans_are_memory_of_their_own():
    staging = Staging(100)
    one, two = staging.take(40, "a"), staging.take(60, "a")
    one.view[:] = b"x" * 40
    two.view[:] = b"y" * 60
    assert bytes(one.view) == b"x" * 40
    assert one.bytes.tolist() == [ord("x")] * 40
    assert staging.used == 100
    assert not staging.fits(1)


def test_what_is_given_back_is_used_again_lowest_first():
    staging = Staging(100)
    spans = [staging.take(20, "a") for _ in range(5)]
    spans[3].release()
    spans[1].release()
    assert staging.take(20, "a").start == 20
    assert staging.take(20, "a").start == 60
    assert staging.take(1, "a") is None


def test_giving_back_twice_is_giving_back_once():
    staging = Staging(10)
    span = staging.take(10, "a")
    span.release()
    other = staging.take(10, "a")
    span.release()
    assert staging.take(1, "b") is None
    other.release()
    assert staging.used == 0


def test_who_asked_first_is_served_first():
    staging = Staging(100)
    span = staging.take(80, "a")
    assert staging.take(50, "large") is None
    assert staging.first == "large"
    assert staging.take(10, "small") is None, "it would fit, but somebody waits for more"
    span.release()
    assert staging.take(10, "small") is None
    assert staging.take(50, "large") is not None
    assert staging.first == "small"
    assert staging.take(10, "small") is not None
    assert staging.first is None


def test_who_leaves_does_not_keep_the_others_waiting():
    staging = Staging(100)
    span = staging.take(80, "a")
    assert staging.take(50, "large") is None
    assert staging.take(10, "small") is None
    staging.leave("large")
    staging.leave("never came")
    assert staging.take(10, "small") is not None
    span.release()


def test_a_wish_that_can_never_be_met_is_a_mistake():
    with pytest.raises(AssertionError, match="never"):
        Staging(10).take(11, "a")


def test_any_order_of_taking_and_giving_back():
    rng, staging, held = random.Random(1), Staging(1000), []
    for _ in range(3000):
        if held and rng.random() < 0.5:
            held.pop(rng.randrange(len(held))).release()
        elif (span := staging.take(rng.randint(1, 200), "me")) is not None:
            held.append(span)
        ranges = sorted((span.start, span.start + span.size) for span in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        assert all(0 <= start < end <= 1000 for start, end in ranges)
    for span in held:
        span.release()
    assert staging.take(1000, "me") is not None
