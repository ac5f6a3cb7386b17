"""What the prefix cache gives users of the demo model: a prompt seen before starts sooner, a conversation computes only its newest turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from e2e.servers import Server, together

pytestmark = pytest.mark.full

PAGE = 16
END_OF_TURN = 2
TOPICS = ("the sea", "bread", "chess", "Rome", "owls", "prime numbers", "gravity", "tea")
QUESTIONS = ("Tell me one thing about {}.", "Is that always so?", "Give 3 examples,  please.", "Thanks! Now say it about {} in one word.")


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    """The demo model with default flags but for a small pool."""
    server = Server("demo", "--dtype", "float32", "--max-total-tokens", "16384", "--page-size", str(PAGE))
    yield server
    assert server.close() == 0


def first_token(server: Server, ids: list[int]) -> tuple[float, int]:
    """Seconds from the request to the first token, and the cached tokens."""
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    began = time.monotonic()
    events = server.stream("/generate", {"input_ids": ids, "sampling_params": sampling})
    first = next(events)
    seconds = time.monotonic() - began
    assert first["output_ids"]
    for _ in events:
        pass
    return seconds, first["meta_info"]["cached_tokens"]


def test_a_prompt_seen_before_starts_five_times_sooner(demo: Server) -> None:
    ids = [3 + 37 * index % 40000 for index in range(1024)]
    cold, warm = [], []
    for _ in range(3):
        assert demo.post("/flush_cache").status == 200
        seconds, cached = first_token(demo, ids)
        assert cached == 0
        cold.append(seconds)
        seconds, cached = first_token(demo, ids)
        assert cached >= 1008
        warm.append(seconds)
    assert statistics.median(cold) >= 5 * statistics.median(warm), (cold, warm)


def tokens(server: Server, text: str) -> list[int]:
    ids: list[int] = server.post("/tokenize", {"text": text, "add_special_tokens": False}).json["tokens"]
    return ids


def test_a_conversation_computes_only_what_is_new(demo: Server) -> None:
    assert demo.post("/flush_cache").status == 200

    def talk(topic: str) -> list[tuple[int, int]]:
        """(cached tokens, tokens that the cache should hold) of every turn."""
        seen, history, held = [], list[int](), 0
        for question in QUESTIONS:
            asked = f"<|im_start|>user\n{question.format(topic)}<|im_end|>\n<|im_start|>assistant\n"
            prompt = history + tokens(demo, asked)
            answer: Any = demo.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 40})
            seen.append((answer["meta_info"]["cached_tokens"], held))
            output: list[int] = answer["output_ids"]
            # The last token was sampled and not computed: the cache holds all before it, in whole pages.
            held = (len(prompt) + len(output) - 1) // PAGE * PAGE
            closing = "\n" if output[-1] == END_OF_TURN else "<|im_end|>\n"
            history = prompt + output + tokens(demo, closing)
        return seen

    for seen in together([partial(talk, topic) for topic in TOPICS]):
        assert [cached for cached, _ in seen[1:]] == [held for _, held in seen[1:]]
        assert all(held for _, held in seen[1:])
