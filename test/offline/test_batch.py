"""What a program may hand to `LLM`: every form of prompts, one value or a list of them, and refusals that say where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixpd.errors import BadRequest
from radixpd.offline.batch import admit_conversations, admit_prompts
from radixpd.runtime.admission import Limits
from radixpd.runtime.defaults import Defaults

MANAGER: Any = SimpleNamespace(limits=Limits(vocab_size=100, context_length=64, pool_tokens=64, max_running=8), defaults=Defaults())
HELLO = [{"role": "user", "content": "hello"}]


def admit(prompts: Any = None, sampling: Any = None, *, input_ids: Any = None, **options: Any) -> Any:
    return admit_prompts(MANAGER, prompts, input_ids, sampling, options)


def refused(*arguments: Any, **keywords: Any) -> BadRequest:
    with pytest.raises(BadRequest) as error:
        admit(*arguments, **keywords)
    return error.value


def shown(prompt: Any) -> Any:
    return prompt if isinstance(prompt, str) else prompt.tolist()


@pytest.mark.parametrize(
    ("given", "prompts", "many"),
    [
        ("a", ["a"], False),
        (["a"], ["a"], True),
        (["a", "b"], ["a", "b"], True),
        ([5, 6], [[5, 6]], False),
        ((5, 6), [[5, 6]], False),
        ([[5, 6], [7]], [[5, 6], [7]], True),
        (["a", [5, 6]], ["a", [5, 6]], True),
        (np.array([5, 6], dtype=np.int32), [[5, 6]], False),
        (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]], True),
        ([np.array([5, 6]), np.array([7])], [[5, 6], [7]], True),
        ([np.int64(5), 6], [[5, 6]], False),
        ([], [], True),
    ],
)
def test_every_form_of_prompts(given: Any, prompts: Any, many: bool) -> None:
    batch = admit(given)
    assert [shown(ask.prompt) for ask in batch.asks] == prompts
    assert batch.many == many
    if not isinstance(given, str) and prompts and not isinstance(prompts[0], str):
        assert [shown(ask.prompt) for ask in admit(input_ids=given).asks] == prompts


def test_sampling_parameters_and_options_are_for_all_or_for_each() -> None:
    one, two = admit(["a", "b"], {"top_k": 3}, priority=2).asks
    assert (one.params.top_k, two.params.top_k, one.priority, two.priority) == (3, 3, 2, 2)
    batch = admit(["a", "b"], [{"top_k": 3}, {"n": 2}], priority=[1, 2], rid=["x", "y"], token_ids_logprob=[[1], [2]], return_logprob=True)
    one, two = batch.asks
    assert (one.params.top_k, two.params.top_k, one.priority, two.priority, one.rid, two.rid) == (3, -1, 1, 2, "x", "y")
    assert (one.params.logprobs.token_ids, two.params.logprobs.token_ids) == ((1,), (2,))
    assert batch.samples == 3
    assert admit("a", {"n": 2}).many
    assert admit("a", None).asks[0].params.max_new_tokens == 128


@pytest.mark.parametrize(
    ("arguments", "keywords", "message", "param"),
    [
        ((), {}, "give either prompts or input_ids", "prompts"),
        (("a",), {"input_ids": [1]}, "give either prompts or input_ids", "prompts"),
        ((3,), {}, "prompts must be a text, token ids, or a list of either, got int", "prompts"),
        (({"a": 1},), {}, "prompts must be a text, token ids, or a list of either, got dict", "prompts"),
        ((["a", 3],), {}, "prompt 1: a prompt is a text or token ids, got int", "prompts"),
        (([5, True],), {}, "input_ids: token ids are integers", "input_ids"),
        (("a", {1: 2}), {}, "the name of a sampling parameter is a text, got 1", None),
        ((["a", [1.5]],), {}, "prompt 1: input_ids: token ids are integers", "input_ids"),
        ((["a", []],), {}, "prompt 1: input_ids is empty", "input_ids"),
        (([[1], [100]],), {}, "prompt 1: input_ids: ids must be between 0 and 99, got 100", "input_ids"),
        (([100],), {}, "input_ids: ids must be between 0 and 99, got 100", "input_ids"),
        ((["a", "b"], [{}, {"top_p": 7}]), {}, "prompt 1: top_p must be between 1e-06 and 1, got 7.0", "top_p"),
        ((["a", "b"], [{}]), {}, "prompt 0: sampling_params holds 1 values for 2 prompts", "sampling_params"),
        (("a", {"temprature": 1}), {}, "there is no sampling parameter temprature; the nearest is temperature", "temprature"),
        (("a", {"json_schema": "{"}), {}, "json_schema: it is not JSON", "json_schema"),
        (("a", "b"), {}, "sampling_params must be a dict, or a list with one for each prompt, got 'b'", "sampling_params"),
        (("a",), {"return_logprobs": True}, "there is no option return_logprobs; the nearest is return_logprob", "return_logprobs"),
        (("a",), {"text": "b"}, "there is no option text; the nearest is ", "text"),
        (("a",), {"lora_path": "x"}, "lora_path is not served by this server", "lora_path"),
        (("a",), {"bootstrap_room": 5}, "bootstrap_room: this server does not split prefill and decode", "bootstrap_room"),
        ((["a", "b"],), {"rid": "x"}, "prompt 0: rid must be a list, one for each prompt", "rid"),
        ((["a", "b"],), {"rid": ["x", "x"]}, "rid holds a name twice", "rid"),
        ((["a", "b"],), {"priority": [1, 2, 3]}, "prompt 0: priority holds 3 values for 2 prompts", "priority"),
    ],
)
def test_what_is_wrong_is_named(arguments: Any, keywords: Any, message: str, param: str) -> None:
    error = refused(*arguments, **keywords)
    assert str(error).startswith(message)
    assert error.param == param


def test_conversations_take_the_rest_of_the_context_and_no_first_token_of_the_tokenizer() -> None:
    batch = admit_conversations(MANAGER, HELLO, {"top_k": 2}, {}, {})
    assert (len(batch.asks), batch.many, batch.conversations[0].messages) == (1, False, HELLO)
    assert (batch.asks[0].special, batch.asks[0].clamp, batch.asks[0].params.top_k) == (False, True, 2)
    assert batch.asks[0].params.max_new_tokens > 64
    batch = admit_conversations(MANAGER, [HELLO, HELLO], None, {}, {})
    assert (len(batch.asks), batch.many) == (2, True)


@pytest.mark.parametrize("messages", [None, "hello", ["hello"], {"role": "user"}, [HELLO, "x"], [HELLO, 3], [["x"]]])
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(BadRequest, match="messages must be a list of dicts"):
        admit_conversations(MANAGER, messages, None, {}, {})
