"""Admission without HTTP: what the offline interface relies on, and the edges of ranges."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpd.errors import BadRequest
from radixpd.runtime.admission import Limits, Sampling, admit
from radixpd.runtime.fields import RANGES

LIMITS = Limits(vocab_size=100, context_length=64, pool_tokens=1000, max_running=128)


def ask(sampling=(), options=(), names=None):
    return admit("text", dict(sampling), dict(options), limits=LIMITS, names=names or {})


def test_defaults_are_neutral() -> None:
    params = ask().params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (1.0, 1.0, -1, 0.0, 1.0)
    assert (params.max_new_tokens, params.n, params.logprobs, params.logit_bias) == (128, 1, None, ())
    assert ask().clamp
    assert not ask().seeded
    assert not ask({"max_new_tokens": 128}).clamp


def test_the_default_limit_is_at_least_the_minimum() -> None:
    raised = ask({"min_new_tokens": 200})
    assert (raised.params.min_new_tokens, raised.params.max_new_tokens, raised.clamp) == (200, 200, True)
    assert ask({"min_new_tokens": 20}).params.max_new_tokens == 128
    with pytest.raises(BadRequest, match="min_new_tokens must be at most max_new_tokens"):
        ask({"min_new_tokens": 200, "max_new_tokens": 128})


def test_a_default_gives_way_to_what_a_request_says() -> None:
    defaults = Sampling(max_new_tokens=40, min_new_tokens=20, temperature=0.5, sampling_seed=4)

    def params(**sampling):
        return admit("text", sampling, {}, limits=LIMITS, names={}, defaults=defaults).params

    assert (params().max_new_tokens, params().min_new_tokens, params().temperature, params().seed) == (40, 20, 0.5, 4)
    assert (params(max_new_tokens=10).max_new_tokens, params(max_new_tokens=10).min_new_tokens) == (10, 10)
    assert params(min_new_tokens=50).max_new_tokens == 50
    assert (params(temperature=None).temperature, params(seed=7).seed, params(seed=7, sampling_seed=7).seed) == (0.5, 7, 7)
    with pytest.raises(BadRequest, match="seed and sampling_seed mean the same"):
        params(seed=7, sampling_seed=8)
    with pytest.raises(BadRequest, match="min_new_tokens must be at most"):
        params(max_new_tokens=10, min_new_tokens=11)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_no_number_is_infinite(name, value) -> None:
    with pytest.raises(BadRequest, match=name):
        ask({name: value})
    with pytest.raises(BadRequest, match="logit_bias"):
        ask({"logit_bias": {"1": value}})


@pytest.mark.parametrize("name", [name for name in RANGES if name in Sampling.__struct_fields__])
def test_ranges_are_closed(name) -> None:
    low, high = RANGES[name]
    ask({name: low, **({"max_new_tokens": high} if name == "min_new_tokens" else {})})
    ask({name: high, **({"max_new_tokens": high} if name == "min_new_tokens" else {})})
    for value in (low - 1, high + 1):
        with pytest.raises(BadRequest, match="must be between") as caught:
            ask({name: value}, names={name: "theirs"})
        assert caught.value.param == "theirs"


def test_bias_keys_may_be_numbers() -> None:
    assert ask({"logit_bias": {7: 1.0, "3": -1}}).params.logit_bias == ((3, -1.0), (7, 1.0))


def test_stop_strings_are_kept_in_order_once() -> None:
    assert ask({"stop": ["b", "a", "b"]}).params.stop == ("b", "a")
    assert ask({"stop": "a"}).params.stop == ("a",)


@settings(max_examples=300, deadline=None)
@given(
    sampling=st.dictionaries(
        st.sampled_from([*RANGES, "stop", "stop_token_ids", "logit_bias", "ignore_eos", "no_stop_trim", "unknown"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
            max_leaves=5,
        ),
    )
)
def test_anything_is_admitted_within_its_ranges_or_refused(sampling) -> None:
    try:
        params = ask(sampling).params
    except BadRequest:
        return
    assert 0 <= params.temperature <= 100
    assert 0 < params.top_p <= 1
    assert params.min_new_tokens <= params.max_new_tokens or "max_new_tokens" not in sampling or sampling["max_new_tokens"] is None
    assert all(0 <= token < LIMITS.vocab_size for token, _ in params.logit_bias)
