"""What the benchmark asks of a server beside the measurement."""

from __future__ import annotations

from typing import Any

import pytest

from benchmark import target as target_module
from benchmark.target import ServerTokenizer, Target
from radixpd.errors import ConfigError


class FakeTarget(Target):
    """Answers from a table; keeps what it was asked."""

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__("http://127.0.0.1:9/v1/")
        self.asked: list[tuple[str, Any]] = []
        self._answers = answers

    def call(self, path: str, body: Any = None, *, method: str | None = None) -> Any:
        self.asked.append((path, body))
        answer = self._answers.get(path)
        return answer(body) if callable(answer) else answer


def lengths(body: Any) -> dict[str, Any]:
    return {"tokens": [[0] * len(text) for text in body["prompt"]]}


def test_texts_go_in_calls_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "MOST_CHARACTERS", 10)
    monkeypatch.setattr(target_module, "MOST_TEXTS", 3)
    server = FakeTarget({"/tokenize": lengths})
    texts = ["a" * n for n in (4, 6, 1, 1, 1, 1, 30, 2)]
    assert [len(ids) for ids in ServerTokenizer(server, "m").encode(texts)] == [4, 6, 1, 1, 1, 1, 30, 2]
    assert [[len(text) for text in body["prompt"]] for _, body in server.asked] == [[4, 6], [1, 1, 1], [1], [30], [2]]
    assert ServerTokenizer(server, "m").encode([]) == []


@pytest.mark.parametrize("answer", [None, {"count": 3}])
def test_a_server_without_tokenize_needs_a_tokenizer(answer: Any) -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        ServerTokenizer(FakeTarget({"/tokenize": answer}), "m").encode(["a"])


def test_a_server_that_does_not_tell_its_vocabulary() -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        ServerTokenizer(FakeTarget({"/get_model_info": {"model_path": "x"}}), "m").vocab_size  # noqa: B018


def test_model_and_limit_come_from_the_model_card() -> None:
    server = FakeTarget({"/v1/models": {"data": [{"id": "tiny", "max_model_len": 4096}]}})
    assert (server.base_url, server.model, server.limit) == ("http://127.0.0.1:9", "tiny", 4096)
    silent = FakeTarget({})
    assert (silent.model, silent.limit) == ("default", None)


def test_a_server_without_flush_cache() -> None:
    with pytest.raises(ConfigError, match="--flush-cache"):
        FakeTarget({}).flush_cache()
