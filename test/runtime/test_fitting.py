"""What is cut and what is refused: whatever passes fits, and nothing is cut that need not be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixpd.errors import BadRequest
from radixpd.runtime.admission import Limits, admit
from radixpd.runtime.fitting import cut, output_limit

BOS = 7


def ask_for(limits, *, most, truncate):
    return admit("text", {"max_new_tokens": most}, {"truncate_prompt_tokens": truncate}, limits=limits, names={})


@given(
    size=st.integers(1, 300),
    bos=st.sampled_from([None, BOS, 99]),
    most=st.one_of(st.none(), st.integers(0, 300)),
    truncate=st.one_of(st.none(), st.just(-1), st.integers(1, 300)),
    automatic=st.booleans(),
    context=st.integers(2, 120),
    pool=st.integers(2, 120),
)
def test_what_passes_fits(size, bos, most, truncate, automatic, context, pool):
    limits = Limits(vocab_size=500, context_length=context, pool_tokens=pool, max_running=1, auto_truncate=automatic)
    ask = ask_for(limits, most=most, truncate=truncate)
    whole = np.arange(BOS, BOS + size, dtype=np.int32)
    prompt = cut(whole, ask, limits, bos=bos)
    body = prompt[1:] if len(prompt) < size and prompt[0] == bos else prompt
    assert 1 <= len(prompt) <= size
    assert list(body) == list(whole[size - len(body) :])  # its end, behind the bos token if there is one
    if truncate is not None and truncate > 0:
        assert len(prompt) <= truncate
    elif len(prompt) < size:
        assert automatic or truncate == -1
        assert size + (most or 0) + (most is None) > limits.longest  # it did not fit whole
    asked = ask.params.max_new_tokens
    if len(prompt) + (min(asked, 1) if automatic or most is None else asked) > limits.longest:
        assert not automatic
        with pytest.raises(BadRequest, match="the request needs"):
            output_limit(ask, len(prompt), limits)
        return
    limit = output_limit(ask, len(prompt), limits)
    assert len(prompt) + limit <= limits.longest
    assert min(1, asked) <= limit <= asked
    assert limit == asked or automatic or most is None


@pytest.mark.parametrize(
    ("size", "most", "kept", "limit"),
    [(99, None, 99, 1), (100, None, 75, 25), (100, 10, 90, 10), (95, 10, 95, 5), (100, 500, 75, 25), (100, 0, 100, 0), (101, 0, 100, 0)],
)
def test_an_output_that_nobody_insists_on_leaves_three_quarters_to_the_prompt(size, most, kept, limit):
    limits = Limits(vocab_size=500, context_length=100, pool_tokens=1000, max_running=1, auto_truncate=True)
    ask = ask_for(limits, most=most, truncate=None)
    prompt = cut(np.arange(size, dtype=np.int32), ask, limits, bos=None)
    assert (len(prompt), output_limit(ask, len(prompt), limits)) == (kept, limit)
