"""A pair tells each request's journey: what each side found and computed, what crossed, and where one is that does not come on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from e2e.asks import GREEDY
from e2e.pd import Pair
from e2e.pd_prompts import ids
from e2e.servers import Server, together, until

PAGE = 16
ORIGINS = ("decode_hit_tokens", "prefill_hit_tokens", "prefill_computed_tokens", "local_computed_tokens")


def body(prompt: list[int], *, tokens: int = 4, **fields: Any) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": {**GREEDY, "max_new_tokens": tokens, "ignore_eos": True}, **fields}


def journey(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer["meta_info"]["kv_journey"]
    assert sum(found[name] for name in ORIGINS) == found["prompt_tokens"] == answer["meta_info"]["prompt_tokens"]
    return found


def origins(found: dict[str, Any]) -> tuple[int, ...]:
    return tuple(found[name] for name in ORIGINS)


def test_each_token_has_one_origin_and_both_sides_agree(pair: Callable[..., Pair], server: Server) -> None:
    both = pair()
    both.flush()
    prompt = ids(300, 100)
    named = both.named(body(prompt, rid="cold"))
    first, second = both.legs("/generate", named)
    cold = journey(second.json)
    assert (origins(cold), cold["leg"], cold["fallback"], cold["pages_sent"]) == ((0, 0, 100, 0), "decode", "", 7)
    assert cold["bytes_raw"] > 0
    assert cold["bytes_wire"] >= cold["bytes_raw"]
    assert min(cold["reserve_ms"], cold["prefill_ms"], cold["transfer_ms"]) > 0
    assert 0 <= cold["visible_transfer_ms"] <= cold["transfer_ms"]
    leg = journey(first.json)
    assert (origins(leg), leg["leg"], leg["pages_sent"]) == ((0, 0, 100, 0), "prefill", 7)
    assert both.prefill.get("/journey/cold").json["kv_journey"] == leg
    assert both.decode.get("/journey/cold").json["kv_journey"] == cold
    # The conversation goes on: only what is new is computed, and only that crosses.
    longer = prompt + second.json["output_ids"] + ids(301, 40)
    warm = journey(both.generate(**body(longer)))
    assert origins(warm) == (96, 0, 48, 0)
    assert warm["pages_sent"] == 3
    assert warm["bytes_raw"] * 7 == cold["bytes_raw"] * 3
    # What prefill alone remembers counts as its hit.
    both.decode.flush()
    assert origins(journey(both.generate(**body(longer)))) == (0, 128, 16, 0)
    # And what decode has whole does not travel.
    again = journey(both.generate(**body(longer)))
    assert (origins(again), again["pages_sent"], again["bytes_wire"], again["fallback"]) == ((128, 0, 0, 16), 0, 0, "")
    alone = journey(server.generate(**body(longer)))
    assert (alone["leg"], alone["prefill_computed_tokens"]) == ("", 0)


def test_the_openai_routes_tell_it_when_asked(pair: Callable[..., Pair]) -> None:
    both = pair()
    asked = both.named({"prompt": ids(310, 60), "max_tokens": 3, "temperature": 0})
    wish = {"x-radixpd-journey": "1"}
    answers = together([lambda each=each: each.post("/v1/completions", asked, headers=wish) for each in both.both])
    usage = answers[1].json["usage"]
    assert sum(usage["kv_journey"][name] for name in ORIGINS) == usage["prompt_tokens"] == 60


def test_a_request_that_does_not_come_on_says_whom_it_waits_for(pair: Callable[..., Pair]) -> None:
    both = pair(decode=("--disaggregation-transfer-timeout", "2"))
    room = both.room()
    peer = f"127.0.0.1:{both.bootstrap_port}"
    with_room = {**body(ids(320, 80), rid="stuck"), **room}

    def ask() -> Any:
        return both.decode.post("/generate", with_room)

    def watch() -> Any:
        (seen,) = until(lambda: [each for each in both.decode.get("/requests").json if each["part"] == "receiving"], "it has pages")
        assert (seen["rid"], seen["waits_for"], seen["peer"], seen["room"]) == ("stuck", peer, peer, room["bootstrap_room"])
        assert (seen["phase"], seen["pages"], seen["slot"] is not None) == ("parked", 5, True)
        assert 0 <= seen["since"] <= seen["age"]
        live = both.decode.get("/journey/stuck").json
        assert (live["live"], live["whereabouts"]["part"], live["kv_journey"]) == (True, "receiving", None)
        (other,) = until(lambda: both.prefill.get("/requests").json, "prefill has heard of the room")
        assert (other["rid"], other["part"], other["waits_for"]) == (None, "awaiting_body", "request")
        assert both.decode.metric("num_decode_transfer_queue_reqs") == 1

    answer, _ = together([ask, watch])
    found = journey(answer.json)
    assert origins(found) == (0, 0, 0, 80)
    assert "within 2 s (--disaggregation-transfer-timeout)" in found["fallback"]
    assert both.decode.metric("num_fallback_reqs_total") == both.decode.metric("num_transfer_failed_reqs_total") == 1
    both.decode.settled()


def test_metrics_of_a_handoff(pair: Callable[..., Pair]) -> None:
    both = pair()
    both.flush()
    before = [each.metric("kv_transfer_latency_ms_count") for each in both.both]
    pages = both.prefill.metric("kv_transfer_pages_total")
    found = journey(both.generate(**body(ids(330, 50))))
    both.settled()
    assert [each.metric("kv_transfer_latency_ms_count") for each in both.both] == [before[0] + 1, before[1] + 1]
    assert both.prefill.metric("kv_transfer_pages_total") == pages + found["pages_sent"] == pages + 4
    assert both.decode.metric("kv_transfer_bytes_total") > 0
    assert both.decode.metric("kv_transfer_alloc_ms_count") > 0
    assert both.prefill.metric("kv_transfer_bootstrap_ms_count") > 0
