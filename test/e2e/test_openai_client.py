"""The OpenAI Python client against a live server: what its users do first."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from e2e.servers import Server

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    """A client that never retries, so that every answer is seen."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert client.models.retrieve(card.id) == card


def test_chat_plain_and_streamed_agree(client: openai.OpenAI) -> None:
    wish = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    plain = client.chat.completions.create(**wish)
    chunks = list(client.chat.completions.create(**wish, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == plain.choices[0].message.content
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == plain.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens


def test_chat_logprobs(client: openai.OpenAI) -> None:
    wish = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(**wish, extra_body={"ignore_eos": True})
    content = answer.choices[0].logprobs.content
    assert len(content) == 5
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert all(entry.logprob == pytest.approx(entry.top_logprobs[0].logprob) for entry in content), "greedy takes the best"


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["one", "two"], max_tokens=3, n=2, temperature=1, seed=1, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.completion_tokens == 12


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10**7)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1, stream=True)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another-model")
