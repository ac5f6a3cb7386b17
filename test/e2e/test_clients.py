"""docs/clients.md tells the truth: public clients, unmodified, print against the demo model what stands there.

The openai client comes with the tests' own environment; the others have one each (`client_tools`). The large ones run only with
RADIXPD_TEST_CLIENTS=all. lm-eval's log-likelihoods are held to transformers besides: that is what `echo` with `logprobs` is for.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.client_tools import ROOT, client_path, comparable, examples, expected
from e2e.servers import Server
from transformers import AutoModelForCausalLM, AutoTokenizer

LARGE = ("sglang", "guidellm")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # with these aiperf takes a folder for a name on the hub
CLOSE = 1e-3

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    server = Server("demo", "--max-total-tokens", "16384")
    yield server
    assert server.close() == 0


@pytest.fixture(scope="module")
def run(demo: Server, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`run(section)`: every example of a section prints what stands below it; the folder with its results."""

    def run(section: str) -> Path:
        folder = tmp_path_factory.mktemp("results")
        programs = Path(sys.executable).parent if section == "openai" else client_path(section)
        environment = {
            **{name: value for name, value in os.environ.items() if name not in OFFLINE},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "B": demo.url,
            "OUT": str(folder),
            "PYTHONPATH": str(folder),
            "TOK": demo.get("/get_model_info").json["tokenizer_path"],
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        demo.flush()
        for example in examples(section, url=demo.url):
            found = "".join(f"{line}\n" for line in comparable(example.run(environment)))
            assert expected(example.output).match(found), f"{example.command[-1]}\nprinted\n{found}"
        demo.settled()
        return folder

    return run


@pytest.mark.parametrize("section", ["openai", "litellm", "langchain-openai", "instructor", *LARGE])
def test_a_client_prints_what_the_document_says(section: str, run: Any) -> None:
    if section in LARGE and os.environ.get("RADIXPD_TEST_CLIENTS") != "all":
        pytest.skip("RADIXPD_TEST_CLIENTS=all runs the large ones too")
    run(section)


def test_aiperf_has_no_failed_request(run: Any) -> None:
    results = run("aiperf")
    for name in ("chat", "completions"):
        found = json.loads((results / name / "profile_export_aiperf.json").read_text())
        assert (found["request_count"]["avg"], found["output_sequence_length"]["avg"]) == (24, 8)
        assert not found.get("error_summary")
        assert found["time_to_first_token"]["min"] > 0


def test_lm_eval_has_the_log_likelihoods_of_transformers(run: Any, demo: Server) -> None:
    results = run("lm-eval")
    facts = [json.loads(line) for line in (ROOT / "test/e2e/lm_eval_tasks/facts.jsonl").read_text().splitlines()]
    wanted = [(fact["question"], f" {choice}") for fact in facts for choice in fact["choices"]]
    reference = log_likelihoods(demo.get("/get_model_info").json["tokenizer_path"], wanted)
    for how in ("tokens", "texts"):
        (path,) = (results / how).glob("*/samples_facts_choice_*.jsonl")
        found = [response[0] for line in path.read_text().splitlines() for response in json.loads(line)["resps"]]
        assert len(found) == len(reference) == 36
        for (value, greedy), (sum_of_logprobs, best) in zip(found, reference):
            assert float(value) == pytest.approx(sum_of_logprobs, abs=CLOSE)
            assert (greedy in (True, "True")) == best


def log_likelihoods(directory: str, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """Of each continuation after its context: the log-probability, and whether greedy decoding would take it."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for context, continuation in pairs:
        start = len(tokenizer(context).input_ids)
        ids = torch.tensor(tokenizer(context + continuation).input_ids)
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(ids[None]).logits[0, start - 1 : -1], dim=-1)
        chosen = logprobs.gather(-1, ids[start:, None])
        found.append((float(chosen.sum()), bool((logprobs.argmax(-1) == ids[start:]).all())))
    return found
