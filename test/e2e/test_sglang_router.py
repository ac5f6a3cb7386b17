"""An unmodified sglang-router in P/D mode drives a prefill and a decode server: the command of docs/pd.md, 200 requests, none failed.

The router comes with an environment of its own (`client_tools`). Every answer is the one that an aggregated server gives.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from e2e.asks import GREEDY
from e2e.client_tools import ROOT, client_path
from e2e.pd import Front, Pair
from e2e.reference import TOLERANCE
from e2e.servers import ASCII_BIAS, Server, free_port, together

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

REQUESTS = 200
AT_ONCE = 8
END = 60.0  # seconds


def documented(pair: Pair, port: int) -> list[str]:
    """The command of docs/pd.md, for this pair."""
    (line,) = re.findall(r"^\$ (python -m sglang_router(?:.*\\\n)*.*)$", (ROOT / "docs/pd.md").read_text(), re.MULTILINE)
    there = {
        "30000": str(port),
        "http://127.0.0.1:30001": pair.prefill.url,
        "8998": str(pair.bootstrap_port),
        "http://127.0.0.1:30002": pair.decode.url,
    }
    return [there.get(word, word) for word in shlex.split(line.replace("\\\n", " "))]


@pytest.fixture
def group(pair: Callable[..., Pair]) -> Iterator[tuple[Front, Pair]]:
    """A router in front of a pair."""
    both, port = pair(), free_port()
    _, *words = documented(both, port)
    python = str(client_path("sglang-router") / "python")
    router = Front([python, *words, "--prometheus-port", str(free_port())], port, probe="/readiness")
    yield router, both
    router.terminate()
    router.process.wait(END)


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Two hundred requests: every route, prompts long and short, some of them again."""
    found = []
    for index in range(REQUESTS):
        prompt = f"Request {index % 150} asks: " + "why does the tide come in? " * (index % 7)
        wish = {"temperature": 0, "ignore_eos": True, "logit_bias": ASCII_BIAS}
        tokens = 4 + index % 9
        if index % 3 == 0:  # the router does not pass a bias on here
            found.append(("/generate", {"text": prompt, "sampling_params": {**GREEDY, "max_new_tokens": tokens}}))
        elif index % 3 == 1:
            found.append(("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": tokens, **wish}))
        else:
            messages = [{"role": "user", "content": prompt}]
            found.append(("/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": tokens, **wish}))
    return found


def plain(server: Server, path: str, body: dict[str, Any]) -> str:
    """The text of an answer that must succeed."""
    answer = server.post(path, body)
    assert answer.status == 200, (path, answer.status, answer.body)
    if path == "/generate":
        return str(answer.json["text"])
    choice = answer.json["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def streamed(server: Server, path: str, body: dict[str, Any]) -> str:
    """The text of a stream."""
    events = list(server.stream(path, body))
    assert not any("error" in event for event in events), events[-1]
    if path == "/generate":
        return str(events[-1]["text"])
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


def test_two_hundred_requests_through_sglang_router(group: tuple[Front, Pair], server: Server) -> None:
    router, both = group
    asked = bodies()
    expected = [plain(server, *each) for each in asked]
    before = both.prefill.metric("kv_transfer_pages")
    found: list[str] = []
    for start in range(0, REQUESTS, AT_ONCE):
        some = list(enumerate(asked))[start : start + AT_ONCE]
        found += together([lambda index=index, each=each: (streamed if index % 2 else plain)(router, *each) for index, each in some])
    assert len(found) == REQUESTS
    wrong = [(index, one, other) for index, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    assert not wrong
    assert both.prefill.metric("kv_transfer_pages") > before + REQUESTS
    assert both.decode.metric("num_fallback_reqs") == 0
    both.settled()


def test_batches_samples_and_scores_through_sglang_router(group: tuple[Front, Pair], server: Server) -> None:
    router, both = group
    completions = "/v1/completions"
    batch = {"model": "tiny", "prompt": ["a batch of prompts, the first one " * 3, "a second"], "max_tokens": 6, **GREEDY}
    sampled = {"model": "tiny", "prompt": "twice " * 20, "max_tokens": 6, "temperature": 1, "seed": 5, "ignore_eos": True, "n": 2}
    for body in (batch, sampled):
        texts = [[choice["text"] for choice in each.post(completions, body).json["choices"]] for each in (router, server)]
        assert len(texts[0]) == 2
        assert texts[0] == texts[1]
    scored = {
        "text": "scores " * 20, "sampling_params": {**GREEDY, "max_new_tokens": 6}, "return_logprob": True, "logprob_start_len": 0,
    }  # fmt: skip
    meta, alone = (each.generate(**scored)["meta_info"] for each in (router, server))
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert [token for _, token, _ in meta[name]] == [token for _, token, _ in alone[name]]
        for (one, _, _), (other, _, _) in zip(meta[name], alone[name], strict=True):
            assert one == other or abs(one - other) < TOLERANCE
    both.settled()
