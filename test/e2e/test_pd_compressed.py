"""Compressed KV between a prefill and a decode server: fewer bytes cross, conversations go on, and nobody gets it who did not ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from e2e.pd import Pair

FLAG = "--disaggregation-transfer-dtype"
PROMPT = [(7 * at) % 200 + 20 for at in range(300)]


def ask(server: Any, prompt: list[int]) -> tuple[list[int], dict[str, Any]]:
    """Eight tokens, and the way that the prompt took."""
    answer = server.generate(input_ids=prompt, sampling_params={"max_new_tokens": 8, "temperature": 0, "ignore_eos": True})
    return answer["output_ids"], answer["meta_info"]["kv_journey"]


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int4"])
def test_a_conversation_moves_only_its_new_tokens_and_few_bytes(pair: Callable[..., Pair], dtype: str) -> None:
    both = pair(FLAG, dtype)
    both.flush()
    output, journey = ask(both, PROMPT)
    assert journey["pages_sent"] == 19
    assert 0 < journey["bytes_wire"] < 0.6 * journey["bytes_raw"]
    page = journey["bytes_raw"] // 19
    _, journey = ask(both, [*PROMPT, *output, *range(50, 90)])
    assert journey["decode_hit_tokens"] == 304  # of 307 that have KV there
    assert journey["bytes_raw"] == 3 * page
    assert 0 < journey["bytes_wire"] < 0.6 * journey["bytes_raw"]
    # Without a room the decode server computes by itself, from nothing: its own pages are exact.
    _, journey = ask(both.decode, PROMPT)
    assert (journey["decode_hit_tokens"], journey["local_computed_tokens"]) == (0, len(PROMPT))
    both.settled()


def test_plain_pages_tell_their_bytes_too(pair: Callable[..., Pair]) -> None:
    both = pair()
    both.flush()
    _, journey = ask(both, PROMPT)
    assert journey["bytes_wire"] == journey["bytes_raw"] > 0, journey


def test_a_decode_server_that_does_not_take_the_codec_computes_itself_and_says_why(pair: Callable[..., Pair], server: Any) -> None:
    both = pair(prefill=(FLAG, "int8", "--disaggregation-bootstrap-timeout", "2"))
    first, second = both.legs(
        "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
    )
    assert first.status == 504, "prefill has computed nothing: no decode server that fits has asked it to"
    assert second.status == 200, second.body
    reason = second.json["meta_info"]["kv_journey"]["fallback"]
    assert reason.endswith(f"cannot pair with the prefill server 127.0.0.1:{both.bootstrap_port}: {FLAG} int8 there, none here")
    assert second.json["output_ids"] == ask(server, PROMPT)[0]
    both.settled()
