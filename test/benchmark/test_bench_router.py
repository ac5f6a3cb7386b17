"""bench_router: its plans and yardsticks, its stub workers, and the program itself on a small scale."""

from __future__ import annotations

import itertools
import json
import random
import urllib.request
from collections import OrderedDict

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark import bench_router
from benchmark.router_cache import BlockCache
from benchmark.router_fleet import Peers, start_fleet
from benchmark.router_measure import CacheRow
from benchmark.router_plans import BLOCK, PLANS, Plan, ideal_hits, make, pooled_hits, rendered
from benchmark.router_stub import write_tokenizer
from radixpd.core.page_hash import event_id, page_hashes, root_hash, token_bytes
from radixpd.errors import ConfigError
from radixpd.mini_lb.card import read_card
from radixpd.mini_lb.feed import Feed, decode
from radixpd.mini_lb.prefix_index import PrefixIndex
from radixpd.text.chat import load_chat_template, render_arguments
from radixpd.text.tokenizer import load_tokenizer

NAMES = st.sampled_from(sorted(PLANS))
SEEDS = st.integers(0, 2**32)
SECONDS = 20


# ---- plans -------------------------------------------------------------------------------------------------------------------


@settings(max_examples=5, deadline=None)
@given(NAMES, SEEDS, st.integers(1, 60))
def test_a_plan_is_made_by_its_seed(name: str, seed: int, requests: int) -> None:
    plan = make(name, seed, requests)
    assert plan == make(name, seed, requests)
    assert plan.requests == requests
    assert plan.chars == sum(len(rendered(prompt)) for talk in plan.talks for prompt in talk)
    other = make(name, seed + 1, requests)
    assert not {prompt[:BLOCK] for prompt in plan.order(1)} & {prompt[:BLOCK] for prompt in other.order(1)}


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.integers(1, 60), st.integers(1, 20))
def test_every_prompt_is_sent_once_and_a_talk_in_its_order(seed: int, requests: int, clients: int) -> None:
    plan = make("turns", seed, requests)
    sent = list(plan.order(clients))
    assert sorted(sent) == sorted(prompt for talk in plan.talks for prompt in talk)
    at = {prompt: number for number, prompt in enumerate(sent)}
    assert all(at[sooner] < at[later] for talk in plan.talks for sooner, later in itertools.pairwise(talk))
    for number in range(len(sent)):
        begun = sum(at[talk[0]] <= number < at[talk[-1]] for talk in plan.talks)
        assert begun <= clients


def test_each_turn_goes_on_with_the_answer_to_the_one_before() -> None:
    for talk in make("turns", 1, 8).talks:
        assert all(later.startswith(sooner + " tok" * 8) for sooner, later in itertools.pairwise(talk))


@settings(max_examples=5, deadline=None)
@given(NAMES, SEEDS)
def test_no_cache_has_more_than_the_one_without_an_end(name: str, seed: int) -> None:
    plan = make(name, seed, 60)
    ideal = ideal_hits(plan)
    assert pooled_hits(plan, plan.chars + BLOCK * plan.requests, 4) == ideal
    assert 0 <= pooled_hits(plan, 20_000, 4) <= ideal < plan.chars


def test_the_ideal_cache_is_what_it_says() -> None:
    plan = Plan("by hand", (("a" * 200,), ("a" * 130 + "b" * 70,), ("c" * 200,)))
    # "user:" and 200 characters are 3 blocks; of the second prompt the first two are known.
    assert ideal_hits(plan) == 2 * BLOCK


# ---- the cache ---------------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 9), max_size=6, unique=True), max_size=30), st.integers(1, 8))
def test_the_cache_is_an_lru_of_blocks_and_tells_every_change(prompts: list[list[int]], blocks: int) -> None:
    cache: BlockCache[int] = BlockCache(blocks)
    simple: OrderedDict[int, None] = OrderedDict()
    told: set[int] = set()
    for prompt in prompts:
        hits = next((at for at, block in enumerate(prompt) if block not in simple), len(prompt))
        for block in prompt:
            simple[block] = None
            simple.move_to_end(block)
        while len(simple) > blocks:
            simple.popitem(last=False)
        served = cache.serve(prompt)
        assert served.hits == hits
        told |= {block for start, end in served.stored for block in prompt[start:end]}
        told -= set(served.removed)
        assert told == set(simple)
    assert len(cache) <= blocks


# ---- stub workers ------------------------------------------------------------------------------------------------------------


def _ask(url: str, path: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return bytes(answer.read())


def _chat(text: str, **more: object) -> dict[str, object]:
    return {"model": "stub", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory):
    """One stub worker with room for 100 blocks."""
    folder = write_tokenizer(tmp_path_factory.mktemp("stub"))
    flags = ("--cache-chars", str(100 * BLOCK), "--prefill-us-per-char", "0", "--itl-ms", "0")
    with start_fleet(1, folder, flags=flags) as fleet:
        yield fleet, folder


def test_a_stub_answers_on_every_route_and_counts_what_it_had(stub) -> None:
    fleet, _ = stub
    (url,) = fleet.urls
    fleet.flush()
    text = "x" * (10 * BLOCK)
    first, again = (json.loads(_ask(url, "/v1/chat/completions", _chat(text)))["usage"] for _ in range(2))
    assert first["prompt_tokens"] == len(rendered(text))
    assert [each["prompt_tokens_details"]["cached_tokens"] for each in (first, again)] == [0, 10 * BLOCK]
    assert json.loads(_ask(url, "/generate", {"text": rendered(text)}))["meta_info"]["cached_tokens"] == 10 * BLOCK
    assert json.loads(_ask(url, "/v1/completions", {"prompt": "other"}))["choices"][0]["text"] == " tok" * 8
    events = _ask(url, "/v1/chat/completions", _chat(text, stream=True)).decode().split("\n\n")
    assert len(events) == 10
    assert events[8] == "data: [DONE]"
    assert json.loads(events[7][6:])["usage"]["completion_tokens"] == 8
    assert json.loads(events[0][6:])["choices"][0]["delta"]["content"] == " tok"
    (stats,) = fleet.stats()
    assert stats["requests"] == 5
    assert stats["cached_chars"] == 3 * 10 * BLOCK
    load = json.loads(_ask(url, "/get_load"))
    assert load["free_pages"] == 90
    for path in ("/health", "/v1/models", "/get_model_info", "/v1/loads"):
        _ask(url, path)


def test_the_balancer_names_a_stubs_pages_as_the_stub_does(stub) -> None:
    """Its tokenizer, template and hashes lead to the very ids of its events, and these, applied in order, to what it has."""
    fleet, folder = stub
    (url,) = fleet.urls
    fleet.flush()
    card = read_card(_ask(url, "/server_info"), url)
    assert card is not None
    assert card.events is not None
    tokenizer, template = load_tokenizer(folder), load_chat_template(folder)
    assert template is not None
    draw = random.Random(0)
    texts = ["".join(draw.choices("abc é", k=40 * BLOCK)) for _ in range(4)]
    index = PrefixIndex()
    feed = Feed("w", index)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(card.events.replay)
        for text in texts:
            _ask(url, "/v1/chat/completions", _chat(text))
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            assert socket.poll(1000 * SECONDS), "no replay"
            _, sequence, payload = socket.recv_multipart()
            if sequence == b"\xff" * 8:
                break
            feed.replayed(int.from_bytes(sequence, "big"), decode(payload), 0.0)
    assert index.held("w") == 100
    for text, whole in zip(reversed(texts), (True, True, False, False)):
        prompt = template.render(
            **render_arguments([{"role": "user", "content": text}], generation=None, continued=False, template_kwargs=None)
        )
        ids = tokenizer.encode(prompt, special=False)
        pages = [event_id(page) for page in page_hashes(root_hash(card.hashing.fingerprint, b""), token_bytes(ids), 4 * BLOCK)]
        assert index.match(pages) == ({"w": (len(pages), 0)} if whole else {})


# ---- the program -------------------------------------------------------------------------------------------------------------


def test_a_small_run_prints_every_policy_and_its_targets(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--part", "cache", "--seeds", "1", "--requests", "40", "--workloads", "prefixes", "--policies", "kv_cost", "round_robin"]
    assert bench_router.main([*flags, "--prefill-us-per-char", "0", "--itl-ms", "0", "--workers", "2", "--json"]) == 0
    out = capsys.readouterr().out
    assert "sglang-router is left out: --peers is not given" in out
    rows = msgspec.json.decode(out.splitlines()[-1])["cache"]
    assert [(row["router"], row["failures"]) for row in rows] == [("radixpd kv_cost", {}), ("radixpd round_robin", {})]
    assert all(0 <= row["of_ideal"] <= 1 for row in rows)


def test_targets_are_met_or_missed_by_the_medians() -> None:
    def row(router: str, seed: int, of_ideal: float) -> CacheRow:
        return CacheRow(router, "zipf", seed, 0.7, of_ideal, 0.99, 1.2, 1.3, 500.0, {})

    rows = [row("radixpd kv_cost", seed, share) for seed, share in enumerate((0.2, 0.96, 0.99))]
    rows += [row("sglang-router cache_aware", seed, 0.97) for seed in range(3)]
    lines = bench_router.targets(bench_router.medians(rows))
    assert lines == [
        "  zipf: of ideal 0.9600, at least 0.95: met",
        "  zipf: work of the busiest 1.200 of the mean, at most 1.25: met",
        "  zipf: of ideal 0.9600, sglang-router 0.9700: MISSED",
    ]


def test_a_python_that_is_none_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--peers"):
        Peers.find("/nowhere/python")
    assert bench_router.main(["--peers", "/nowhere/python"]) == 2
    assert "--peers /nowhere/python" in capsys.readouterr().err
