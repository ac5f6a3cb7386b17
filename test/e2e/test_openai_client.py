"""The OpenAI Python client against a live server: what its users do first, and what it does when something goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pydantic
import pytest
from e2e.servers import Server

MESSAGES = [{"role": "user", "content": "hello"}]


class Place(pydantic.BaseModel):
    """Somewhere."""

    name: str = pydantic.Field(max_length=6)
    floor: int = pydantic.Field(ge=0, le=9)
    tags: list[str] = pydantic.Field(max_length=0)


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


def test_completions_with_echo_score_the_prompt(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "echo", "echo": True, "logprobs": 2, "temperature": 0}
    (scored,) = client.completions.create(**asked, max_tokens=0).choices
    assert scored.text == "echo" == "".join(scored.logprobs.tokens)
    assert scored.logprobs.text_offset == [0, 1, 2, 3]
    assert scored.logprobs.token_logprobs[0] is None
    assert all(value <= max(top.values()) for value, top in zip(scored.logprobs.token_logprobs[1:], scored.logprobs.top_logprobs[1:]))
    (longer,) = client.completions.create(**asked, max_tokens=3, extra_body={"ignore_eos": True}).choices
    assert longer.logprobs.token_logprobs[1:4] == pytest.approx(scored.logprobs.token_logprobs[1:], abs=1e-4)
    assert len(longer.logprobs.tokens) == 7


def test_seeds_repeat_and_a_stop_string_cuts(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "seed", "max_tokens": 24, "temperature": 1, "extra_body": {"ignore_eos": True}}
    first, again, other = (client.completions.create(**asked, seed=seed).choices[0].text for seed in (7, 7, 8))
    assert first == again != other
    sure = next(character for character in first if character.isascii() and character.isprintable())
    (cut,) = client.completions.create(**asked, seed=7, stop=[sure]).choices
    assert (cut.text, cut.finish_reason) == (first.partition(sure)[0], "stop")


async def test_the_asynchronous_client_streams_many_at_once(server: Server, client: openai.OpenAI) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as many:

        async def one(index: int) -> str:
            wish = {"model": "tiny", "prompt": f"number {index}", "max_tokens": 16, "temperature": 0}
            return "".join([chunk.choices[0].text async for chunk in await many.completions.create(**wish, stream=True)])

        found = await asyncio.gather(*[one(index) for index in range(16)])
    alone = client.completions.create(model="tiny", prompt="number 3", max_tokens=16, temperature=0)
    assert found[3] == alone.choices[0].text


def test_a_missing_key_is_an_authentication_error(serve: Callable[..., Server]) -> None:
    locked = serve("--api-key", "sk-right")
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="sk-wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.models.list()
        assert caught.value.code == "invalid_api_key"
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="sk-right", max_retries=0) as friend:
        assert len(friend.models.list().data) == 1


def test_an_abort_in_mid_stream_is_an_error(server: Server, client: openai.OpenAI) -> None:
    wish: dict[str, Any] = {"model": "tiny", "prompt": "long", "max_tokens": 3000, "extra_body": {"ignore_eos": True, "rid": "mid"}}
    chunks = client.completions.create(**wish, stream=True)
    next(chunks)
    server.post("/abort_request", {"rid": "mid"})
    with pytest.raises(openai.APIError, match="abort"):
        list(chunks)
    server.settled()


def test_a_client_that_stops_waiting_aborts_its_request(server: Server, client: openai.OpenAI) -> None:
    wish: dict[str, Any] = {"model": "tiny", "prompt": "long", "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
    aborted = server.metric("num_aborted_requests")
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(**wish)
    with client.completions.create(**wish, stream=True) as chunks:
        next(iter(chunks))
    server.settled()
    assert server.metric("num_aborted_requests") == aborted + 2


def test_a_busy_server_is_tried_again(serve: Callable[..., Server]) -> None:
    narrow = serve("--max-concurrent-requests", "1")
    wish: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
    with openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=0) as holder:
        held = holder.completions.create(**wish, stream=True)
        next(iter(held))
        with pytest.raises(openai.InternalServerError) as caught:
            holder.completions.create(model="tiny", prompt="b", max_tokens=1)
        assert (caught.value.status_code, caught.value.type) == (503, "overloaded_error")
        assert int(caught.value.response.headers["retry-after"]) >= 1

        def give_way(response: Any) -> None:
            seen.append(response.status_code)
            held.close()

        seen: list[int] = []
        with (
            openai.DefaultHttpxClient(event_hooks={"response": [give_way]}) as transport,
            openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="none", http_client=transport) as patient,
        ):
            answer = patient.completions.create(model="tiny", prompt="b", max_tokens=1)
    assert answer.usage.completion_tokens == 1
    assert seen == [503, 200]


def test_parse_gives_what_was_asked_for(client: openai.OpenAI) -> None:
    """The client turns the class into a strict schema, and the answer into an object of it."""
    wish: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "temperature": 1, "seed": 4}
    parsed = client.chat.completions.parse(**wish, response_format=Place).choices[0].message.parsed
    assert isinstance(parsed, Place)
    tools = [openai.pydantic_function_tool(Place, name="go")]
    answer = client.chat.completions.parse(**wish, tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Place)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "go"}}], ids=str)
def test_tools_plain_and_streamed(client: openai.OpenAI, choice: Any) -> None:
    tools = [openai.pydantic_function_tool(Place, name="go")]
    wish: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "temperature": 1, "seed": 6, "tools": tools}
    wish |= {"tool_choice": choice, "parallel_tool_calls": False}
    plain = client.chat.completions.create(**wish).choices[0]
    with client.chat.completions.stream(**wish) as events:
        streamed = events.get_final_completion().choices[0]
    assert plain.finish_reason == streamed.finish_reason == "tool_calls"
    (one,), (other,) = plain.message.tool_calls, streamed.message.tool_calls
    assert (one.function.name, one.function.arguments) == (other.function.name, other.function.arguments)
    Place.model_validate_json(one.function.arguments)
