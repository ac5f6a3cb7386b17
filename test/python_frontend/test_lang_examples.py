"""The examples, each with answers that a test knows, and that each asks for its common prefix once."""

from __future__ import annotations

from typing import Any

import pytest
import radixpd_lang as rx
from examples import few_shot_batch, json_extraction, judge, multi_turn_chat, rag, self_consistency, tree_of_thought


def warmed(fake: rx.Fake) -> list[str]:
    return [str(call.prompt) for call in fake.calls if call.kind == "warm"]


def likes(best: str) -> Any:
    return lambda prompt, choice: [-0.1 if choice == best else -1.0]


def test_few_shot_batch() -> None:
    fake = rx.Fake(scores=lambda prompt, choice: [-0.1 if (choice == "positive") == ("laughed" in prompt) else -1.0])
    lines = few_shot_batch.run(fake)
    assert [line.split(":")[0] for line in lines].count("positive") == 1
    assert next(line for line in lines if line.startswith("positive")).endswith("what a show!")
    assert len(warmed(fake)) == 1
    assert warmed(fake)[0].count("Review:") == len(few_shot_batch.SHOTS) + 1


def test_tree_of_thought_follows_the_most_promising_step() -> None:
    steps = ["walk", "swim", "row"]

    def score(prompt: str | None, choice: str) -> list[float]:
        row = (prompt or "").split("\n")[-2].endswith("row")
        return [-0.1 if (choice == "good") == row else -2.0]

    fake = rx.Fake({"step": steps, "answer": "done"}, score)
    assert tree_of_thought.run(fake) == ["row | row | done"]
    assert len([call for call in fake.calls if call.name == "step"]) == 6


def test_multi_turn_chat() -> None:
    fake = rx.Fake({"answer": lambda prompt, sampling: f"answer {len(prompt.messages) // 2}"})
    assert multi_turn_chat.run(fake, size=2) == ["answer 1 | answer 2 | answer 3 | answer 4"] * 2
    assert [len(call.prompt.messages) for call in fake.calls if call.kind == "warm"] == [1]


def test_json_extraction() -> None:
    person = '{"name": "Ada", "born": 1815, "alive": false}'
    found = json_extraction.run(rx.Fake({"person": person, "phone": "+44 123 4567"}), size=2)
    assert found == [{"name": "Ada", "born": 1815, "alive": False, "phone": "+44 123 4567"}] * 2


def test_the_judge_reads_its_essay_once() -> None:
    fake = rx.Fake({"remark": "Fine", "verdict": "All fine."}, likes("good"))
    assert judge.run(fake) == ["clarity: good, evidence: good, originality: good, style: good | All fine."]
    assert len(warmed(fake)) == 1
    verdict = next(call.prompt for call in fake.calls if call.name == "verdict")
    assert verdict.messages[-1].content.count(": Fine\n") == 4


def test_self_consistency_takes_the_commonest_answer() -> None:
    fake = rx.Fake({"number": [" 17", " 18.", " 17."]})
    assert self_consistency.run(fake, size=1, samples=3)[0].startswith("17: Tom")
    seeds = {call.sampling.seed for call in fake.calls if call.name == "thought"}
    assert len(seeds) == 3


def test_rag_puts_each_document_first_and_once() -> None:
    fake = rx.Fake({"answer": lambda prompt, sampling: "ferry" if "north pier" in str(prompt) else "library"})
    lines = rag.run(fake)
    assert len(lines) == 8
    assert [line.endswith("ferry") for line in lines] == [True] * 4 + [False] * 4
    assert sorted("north pier" in prompt for prompt in warmed(fake)) == [False, False, True]  # the system turn, and two documents


@pytest.mark.parametrize("example", [few_shot_batch, json_extraction, judge, multi_turn_chat, rag, self_consistency, tree_of_thought])
def test_without_hints_an_example_sends_what_it_asks_for_only(example: Any) -> None:
    fake = rx.Fake({"person": "{}"})
    example.run(fake, hints=False)
    assert warmed(fake) == []
    assert "http://127.0.0.1:30000" in example.__doc__
