"""Stop rules on ids and counts: the batch test names candidates, the exact test decides."""

from __future__ import annotations

import numpy as np
import pytest

from radixpd.core.request import Finish, Request, SamplingParams
from radixpd.core.slots import SlotTable
from radixpd.core.stop import ended, finish_of

EOS = np.array([2, 3], dtype=np.int32)
PROMPT = 4


def _finish(token: int, output: int, **params: object) -> Finish | None:
    """The verdict of both tests together, after `output` tokens of which the last is `token`."""
    request = Request("r", np.arange(PROMPT, dtype=np.int32), PROMPT, SamplingParams(max_new_tokens=8, **params))  # type: ignore[arg-type]
    table = SlotTable(2, 64, 4)
    table.take(request)
    table.known[request.slot] = PROMPT + output
    named = ended(table, np.array([request.slot], dtype=np.int32), np.array([token], dtype=np.int32), EOS)
    exact = finish_of(request, PROMPT + output, token, EOS)
    assert named[0] or exact is None, "the batch test missed an end"
    return exact


@pytest.mark.parametrize(
    ("token", "output", "params", "finish"),
    [
        (9, 1, {}, None),
        (2, 1, {}, Finish("stop", matched=2)),
        (3, 1, {}, Finish("stop", matched=3)),
        (2, 1, {"ignore_eos": True}, None),
        (9, 8, {}, Finish("length")),
        (2, 8, {}, Finish("stop", matched=2)),  # a stop wins over the length
        (2, 8, {"ignore_eos": True}, Finish("length")),
        (7, 1, {"stop_token_ids": (6, 7)}, Finish("stop", matched=7)),
        (7, 1, {"stop_token_ids": (6, 7), "ignore_eos": True}, Finish("stop", matched=7)),
        (2, 1, {"stop_token_ids": (2,), "ignore_eos": True}, Finish("stop", matched=2)),
        (2, 2, {"min_new_tokens": 3}, None),
        (2, 3, {"min_new_tokens": 3}, Finish("stop", matched=2)),
        (7, 2, {"min_new_tokens": 3, "stop_token_ids": (7,)}, None),
        (9, 8, {"min_new_tokens": 8}, Finish("length")),
    ],
)
def test_rules(token: int, output: int, params: dict[str, object], finish: Finish | None) -> None:
    assert _finish(token, output, **params) == finish


def test_rows_without_rules_are_not_named_for_nothing() -> None:
    table = SlotTable(4, 64, 4)
    for rid in "abc":
        request = Request(rid, np.arange(PROMPT, dtype=np.int32), PROMPT, SamplingParams(max_new_tokens=8))
        table.take(request)
        table.known[request.slot] = PROMPT + 1
    slots = np.arange(3, dtype=np.int32)
    assert ended(table, slots, np.array([9, 2, 9], dtype=np.int32), EOS).tolist() == [False, True, False]


def test_no_eos_at_all() -> None:
    table = SlotTable(1, 64, 4)
    request = Request("r", np.arange(PROMPT, dtype=np.int32), PROMPT, SamplingParams(max_new_tokens=8))
    table.take(request)
    assert not ended(table, np.array([0]), np.array([2]), EOS[:0]).any()
