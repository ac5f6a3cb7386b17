"""schemathesis against our own `/openapi.json`: whatever is sent, the server answers as the document says, and stays alive.

The seed is fixed and printed; another one comes from the environment: RADIXPD_FUZZ_SEED=7.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from e2e.fuzzing import fuzz
from e2e.servers import Server

SEED = int(os.environ.get("RADIXPD_FUZZ_SEED", "1"))
# A short context keeps answers short: the document then asks for no long ones.
FLAGS = ("--context-length", "128", "--max-running-requests", "8", "--threads", "1")


GENERATING = ("POST /generate", "PUT /generate", "POST /v1/completions", "POST /v1/chat/completions")


@pytest.mark.parametrize(
    ("requests", "examples", "coverage"),
    [(150, 6, False), pytest.param(5000, 30, True, marks=[pytest.mark.full, pytest.mark.timeout(1500)])],
)
def test_whatever_is_sent_is_answered_as_described(serve: Callable[..., Server], requests: int, examples: int, coverage: bool) -> None:
    server = serve(*FLAGS)
    before = server.children()
    tally = fuzz(server, seed=SEED, examples=examples, coverage=coverage)
    print(tally)
    assert tally.failures == {}, f"\n{tally}"
    assert tally.requests >= requests, tally
    assert not any(status >= 500 for status in tally.statuses), tally
    assert sum(tally.good[name][200] for name in GENERATING) >= requests // 50, f"hardly anything was generated\n{tally}"
    # Alive: the same processes, nothing left running, every page accounted for, and it still answers.
    assert server.children() == before
    server.settled()
    assert server.generate(text="alive?", sampling_params={"max_new_tokens": 4, "ignore_eos": True})["meta_info"]["completion_tokens"] == 4
    assert "\nTraceback" not in server.log


@pytest.mark.full
def test_keys_are_asked_for_as_described(serve: Callable[..., Server]) -> None:
    """The whole document on a server with keys: schemathesis also leaves the key out, and sends wrong ones."""
    server = serve(*FLAGS, "--api-key", "sesame", "--admin-api-key", "wand")
    tally = fuzz(server, seed=SEED, examples=20, coverage=False, key="wand")
    print(tally)
    assert tally.failures == {}, f"\n{tally}"
    assert not any(status >= 500 for status in tally.statuses), tally
    assert sum(tally.good[name][200] for name in GENERATING) >= 5, f"hardly anything was generated\n{tally}"
    assert "\nTraceback" not in server.log
    assert not any(word in server.log for word in ("sesame", "wand"))
