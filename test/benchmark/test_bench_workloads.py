"""Datasets: lengths, what prompts share, arrivals, and what the same seed and another salt change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_fakes import LetterTokenizer, WordTokenizer

from benchmark.prompts import rng_for
from benchmark.workloads import BLOCK, DatasetOptions, Workload, build, poisson_arrivals
from radixpd.errors import ConfigError

TOKENIZER = WordTokenizer()
SMALL: dict[str, dict[str, Any]] = {
    "random": {"num_prompts": 20, "random_input_len": 60, "random_output_len": 9},
    "random-ids": {"num_prompts": 20, "random_input_len": 60, "random_output_len": 9},
    "generated-shared-prefix": {
        "gsp_num_groups": 3, "gsp_prompts_per_group": 4, "gsp_system_prompt_len": 40, "gsp_question_len": 7, "gsp_output_len": 5,
    },
    "multi-turn": {"num_clients": 3, "num_rounds": 2, "request_length": 12, "output_length": 4},
}  # fmt: skip


def options(name: str, **fields: Any) -> DatasetOptions:
    return DatasetOptions(dataset_name=name, **{**SMALL.get(name, {}), **fields})


def made(name: str, **fields: Any) -> Workload:
    limit, salt = fields.pop("limit", None), fields.pop("salt", 0)
    return build(options(name, **fields), TOKENIZER, limit=limit, salt=salt)


def lengths(workload: Workload) -> list[int]:
    return [len(r.prompt) if isinstance(r.prompt, list) else len(TOKENIZER.encode([r.prompt])[0]) for r in workload.requests]


@pytest.mark.parametrize("name", list(SMALL))
def test_the_same_seed_gives_the_same_requests(name: str) -> None:
    assert made(name) == made(name)
    assert made(name).requests != made(name, seed=2).requests


@pytest.mark.parametrize("name", list(SMALL))
def test_a_salt_changes_every_prompt_and_nothing_else(name: str) -> None:
    plain, salted = made(name).requests, made(name, salt=1).requests
    assert not {str(r.prompt) for r in plain} & {str(r.prompt) for r in salted}
    assert [replace(r, prompt="") for r in plain] == [replace(r, prompt="") for r in salted]


@pytest.mark.parametrize("name", ["random", "random-ids", "generated-shared-prefix"])
def test_prompts_have_the_planned_lengths(name: str) -> None:
    workload = made(name)
    assert lengths(workload) == [r.input_len for r in workload.requests]


@pytest.mark.parametrize(("ratio", "least"), [(0.5, 30), (1.0, 60)])
def test_random_lengths_keep_their_range(ratio: float, least: int) -> None:
    requests = made("random", random_range_ratio=ratio, num_prompts=300).requests
    drawn = [r.input_len for r in requests]
    assert (min(drawn), max(drawn)) == (least, 60)
    assert max(r.output_len for r in requests) == 9


def test_random_ids_leave_special_ids_out() -> None:
    ids = {token for r in made("random-ids", num_prompts=100).requests for token in r.prompt}
    assert not ids & {0, 1}
    assert max(map(int, ids)) < TOKENIZER.vocab_size


def test_a_group_shares_its_system_prompt_and_nothing_more() -> None:
    prompts = [str(r.prompt).split() for r in made("generated-shared-prefix").requests]
    systems = [tuple(words[:39]) for words in prompts]  # and the begin-of-sequence token
    assert sorted(systems.count(system) for system in set(systems)) == [4, 4, 4]
    assert len({tuple(words) for words in prompts}) == 12
    assert systems != sorted(systems, key=systems.index)  # groups are mixed


def test_conversations_come_round_by_round() -> None:
    workload = made("multi-turn")
    assert [(r.session, r.turn) for r in workload.requests] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    # The first prompt has a begin-of-sequence token; later ones stand behind the history.
    assert [len(str(r.prompt).split()) for r in workload.requests] == [11, 11, 11, 12, 12, 12]


@pytest.mark.parametrize("name", list(SMALL))
def test_lengths_of_flags_that_never_fit_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="the server takes 16"):
        made(name, limit=16)


def test_ids_instead_of_texts() -> None:
    plain, ids = made("random").requests, made("random", tokenize_prompt=True).requests
    assert [r.prompt for r in ids] == TOKENIZER.encode([str(r.prompt) for r in plain])


def test_chat_template_here() -> None:
    requests = made("random", apply_chat_template=True).requests
    assert all(isinstance(r.prompt, list) and r.prompt[0] == 1 and len(r.prompt) == r.input_len for r in requests)
    with pytest.raises(ConfigError, match="--apply-chat-template"):
        made("multi-turn", apply_chat_template=True)


# -- traces


def mooncake(path: Path, *rows: tuple[float, int, int, list[int]]) -> str:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(keys, row))) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [(1000, 1100, 30, [7, 8, 9]), (1500, 1300, 20, [7, 8, 10]), (4000, 600, 10, [11, 12])]
    return mooncake(tmp_path / "trace.jsonl", *rows)


def test_equal_hash_ids_give_equal_blocks(trace: str) -> None:
    requests = made("mooncake", dataset_path=trace).requests
    assert lengths(made("mooncake", dataset_path=trace)) == [1100, 1300, 600]
    first, second, third = TOKENIZER.encode([str(r.prompt) for r in requests])
    assert first[: 2 * BLOCK] == second[: 2 * BLOCK]
    assert first[2 * BLOCK : 1100] != second[2 * BLOCK : 1100]
    assert not [at for at, (one, other) in enumerate(zip(first[1:], third[1:])) if one == other][8:]  # some words are equal by chance
    assert [r.output_len for r in requests] == [30, 20, 10]


def test_a_trace_tells_when(trace: str) -> None:
    timed = made("mooncake", dataset_path=trace, use_trace_timestamps=True, mooncake_slowdown_factor=2.0)
    assert [r.arrival for r in timed.requests] == [0.0, 1.0, 6.0]
    assert [r.arrival for r in made("mooncake", dataset_path=trace).requests] == [None] * 3


def test_what_does_not_fit_is_cut_at_its_end_and_counted(trace: str) -> None:
    whole, cut = made("mooncake", dataset_path=trace), made("mooncake", dataset_path=trace, limit=1200)
    assert cut.notes == ("1 of 3 requests did not fit into 1200 tokens and were cut",)
    assert lengths(cut) == [1100, 1180, 600]
    assert str(whole.requests[1].prompt).startswith(str(cut.requests[1].prompt))


def test_an_output_gets_at_most_half_of_the_context(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "trace.jsonl", (0, 600, 900, [1, 2]))
    (request,) = made("mooncake", dataset_path=path, limit=1000).requests
    assert (request.input_len, request.output_len) == (500, 500)


def test_only_so_many_rows(trace: str) -> None:
    assert len(made("mooncake", dataset_path=trace, num_prompts=2).requests) == 2


def test_rows_out_of_order_are_sorted_by_time(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "trace.jsonl", (500, 10, 1, [1]), (0, 20, 2, [2]))
    assert [r.input_len for r in made("mooncake", dataset_path=path).requests] == [20, 10]


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-01-31 23:59:59.2500000,40,8\n2024-02-01 00:00:01.7500000,30,4\n2024-02-01 00:00:01.7512345,40,2\n"
    )
    workload = made("azure", dataset_path=str(path), use_trace_timestamps=True)
    assert [r.arrival for r in workload.requests] == pytest.approx([0.0, 2.5, 2.501234], abs=1e-5)
    assert lengths(workload) == [40, 30, 40]
    assert [r.output_len for r in workload.requests] == [8, 4, 2]
    assert len({str(r.prompt)[:20] for r in workload.requests}) == 3


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("mooncake", '{"timestamp": 0, "input_length": 5}\n', "line 1"),
        ("mooncake", '{"timestamp": 0, "input_length": 5, "output_length": 0, "hash_ids": []}\n', "line 1.*at least 1"),
        ("mooncake", '\n{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}\nnot json\n', "line 3"),
        ("mooncake", "", "no rows"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-31 23:59:59,40,eight\n", "line 2"),
        ("azure", "a,b\n1,2\n", "line 2.*TIMESTAMP"),
        ("sharegpt", '{"a": 1}', "conversations"),
        ("sharegpt", '[{"conversations": []}]', "no conversation has two texts"),
        ("custom", '{"prompt": ""}\n', "line 1.*neither prompt"),
        ("custom", '{"prompt": "a", "timestamp": 1}\n{"prompt": "b"}\n', "some have none"),
    ],
)
def test_a_broken_file_is_refused_with_its_place(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / "data"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        made(name, dataset_path=str(path))


@pytest.mark.parametrize("name", ["mooncake", "azure", "sharegpt", "custom"])
def test_files_must_be_given_and_be_there(name: str) -> None:
    with pytest.raises(ConfigError, match="needs --dataset-path"):
        made(name)
    with pytest.raises(ConfigError, match="/nowhere/at/all"):
        made(name, dataset_path="/nowhere/at/all")


def test_timestamps_must_be_there() -> None:
    with pytest.raises(ConfigError, match="has no timestamps"):
        made("random", use_trace_timestamps=True)


# -- texts of others


def test_sharegpt(tmp_path: Path) -> None:
    def talk(*texts: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": text} for text in texts]}

    path = tmp_path / "share.json"
    good = [talk(f"question number {n} of many", "an answer of six words here", "and more") for n in range(6)]
    path.write_text(json.dumps([*good, talk("alone"), talk("a b c d", "x"), talk("w " * 80, "a b c d e")]))
    workload = made("sharegpt", dataset_path=str(path), limit=60)
    assert {str(r.prompt) for r in workload.requests} == {f"question number {n} of many" for n in range(6)}
    assert {(r.input_len, r.output_len) for r in workload.requests} == {(6, 7)}
    assert workload.notes == ("2 conversations were too short or too long and were skipped",)
    assert len(made("sharegpt", dataset_path=str(path), num_prompts=3).requests) == 3
    assert {r.output_len for r in made("sharegpt", dataset_path=str(path), sharegpt_output_len=11).requests} == {11}


def test_custom(tmp_path: Path) -> None:
    rows = [
        {"prompt": "one two three", "output_len": 5, "timestamp": 2000},
        {"prompt": [5, 6, 7], "output_len": 6, "timestamp": 2500},
        {"conversations": [{"role": "user", "content": "four five"}, {"role": "assistant", "content": "six"}], "timestamp": 3000},
        {"prompt": "w " * 300, "output_len": 5, "timestamp": 9000},
    ]
    path = tmp_path / "custom.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    workload = made("custom", dataset_path=str(path), use_trace_timestamps=True, limit=100)
    assert [(r.prompt, r.input_len, r.output_len, r.arrival) for r in workload.requests] == [
        ("one two three", 4, 5, 0.0), ([5, 6, 7], 3, 6, 0.5), ("four five", 3, 2, 1.0),
    ]  # fmt: skip
    assert workload.notes == ("1 prompts did not fit into 100 tokens and were skipped",)


# -- arrivals


def test_poisson_arrivals_have_their_rate_and_shape() -> None:
    arrivals = np.array(poisson_arrivals(20_001, 8.0, rng_for("test")))
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0.0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)  # exponential: as wide as its mean


def test_an_infinite_rate_is_all_at_once() -> None:
    assert poisson_arrivals(3, float("inf"), rng_for("test")) == [0.0, 0.0, 0.0]
    assert poisson_arrivals(1, 2.0, rng_for("test")) == [0.0]


def test_letters_do_as_well_as_words() -> None:
    workload = build(options("random"), LetterTokenizer())
    assert [len(str(r.prompt)) for r in workload.requests] == [r.input_len for r in workload.requests]
