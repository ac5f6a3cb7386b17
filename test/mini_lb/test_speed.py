"""Speeds: workers that are alike are taken to be so however noisy their times are, one that is not is found out."""

from __future__ import annotations

import random

import pytest

from radixpd.mini_lb.fit import Work
from radixpd.mini_lb.speed import Fits, Speed

PROMPT = Work.of(1000, 0)


def _observe(speeds: dict[str, Speed], seconds: dict[str, float], noise: float, count: int, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(count):
        for name, speed in speeds.items():
            new = draw.choice((50, 200, 1000, 4000))
            time = seconds[name] * new / 1000 + draw.expovariate(1 / noise)
            speed.prompt(Work.of(new, 0), Work(), begun=0.0, seconds=time)


@pytest.mark.parametrize("seed", range(5))
def test_workers_that_are_alike_look_alike(seed: int) -> None:
    common = Fits()
    speeds = {name: Speed(common) for name in "abcd"}
    _observe(speeds, dict.fromkeys("abcd", 0.01), 0.02, 100, seed)
    assert len({speed.prefill.seconds(PROMPT) for speed in speeds.values()}) == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_one_among_them_is_found_out(seed: int) -> None:
    common = Fits()
    speeds = {name: Speed(common) for name in "abcd"}
    _observe(speeds, {"a": 0.01, "b": 0.01, "c": 0.01, "d": 0.04}, 0.001, 60, seed)
    assert speeds["d"].prefill.seconds(PROMPT) > 2 * speeds["a"].prefill.seconds(PROMPT)
    assert speeds["d"].prefill.seconds(PROMPT) == pytest.approx(0.041, rel=0.25)


def test_a_newcomer_is_like_the_fleet() -> None:
    common = Fits()
    old = Speed(common)
    _observe({"a": old}, {"a": 0.05}, 0.001, 60, 0)
    assert Speed(common).prefill.seconds(PROMPT) == pytest.approx(0.05, rel=0.2)
