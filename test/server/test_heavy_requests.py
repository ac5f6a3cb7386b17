"""Requests that are small to send and heavy to serve are refused before the work: the event loop stays free."""

from __future__ import annotations

import threading

from radixpd.runtime import tokenizer_manager
from radixpd.runtime.output import Generation
from radixpd.server import replies


async def test_a_text_that_can_never_fit_is_not_tokenized(api, monkeypatch) -> None:
    def encode(text: str, *, special: bool = True) -> None:
        raise AssertionError("tokenized")

    manager = api.service.manager
    most = manager.limits.longest * manager.tokenizer.longest_token
    monkeypatch.setattr(manager.tokenizer, "encode", encode)
    for path, body in (("/generate", {"text": "a" * (most + 1)}), ("/v1/completions", {"prompt": "a" * (most + 1)})):
        error = (await api.post(path, body, status=400))["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))
        assert str(most + 1) in error["message"]


async def test_a_million_ids_are_counted_and_not_looked_at(api) -> None:
    for path, field in (("/generate", "input_ids"), ("/v1/completions", "prompt")):
        error = (await api.post(path, {field: [-1] * 1_000_000}, status=400))["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert "1000000 in the prompt" in error["message"]


async def test_the_longest_text_that_may_fit_is_tokenized(api) -> None:
    manager = api.service.manager
    answer = await api.post("/tokenize", {"text": "a" * (manager.limits.longest * manager.tokenizer.longest_token)})
    assert answer["count"] >= manager.limits.longest


async def test_prompts_times_n_is_capped(api) -> None:
    answer = await api.post("/generate", {"text": ["a"] * 65, "sampling_params": {"n": 64}}, status=400)
    assert answer["error"]["param"] == "n"
    assert str(tokenizer_manager.MAX_SAMPLES) in answer["error"]["message"]
    assert not api.service.client.outputs


async def test_a_template_that_does_not_end_costs_its_own_request(api, monkeypatch) -> None:
    monkeypatch.setattr(tokenizer_manager, "TEXT_SECONDS", 0.05)
    gate = threading.Event()
    monkeypatch.setattr(api.service.manager.template, "render", lambda *_, **__: gate.wait())
    answer = await api.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, status=400)
    assert "chat template" in answer["error"]["message"]
    assert (await api.generate("ab"))["text"] == "ab"
    gate.set()


def test_a_body_of_a_million_unknown_names_is_not_gone_through(monkeypatch) -> None:
    class Body(dict):
        seen = 0

        def __iter__(self):
            for name in super().__iter__():
                self.seen += 1
                yield name

    monkeypatch.setattr(replies, "_warned", set())
    body = Body({f"name{index}": 1 for index in range(3 * replies.MAX_WARNED)})
    replies.warn_unknown(body, ["name1"])
    replies.warn_unknown(body, ["name1"])
    assert len(replies._warned) == replies.MAX_WARNED
    assert "name1" not in replies._warned
    assert body.seen < replies.MAX_WARNED + 10


async def test_the_end_of_an_output_does_not_look_at_the_others() -> None:
    class Group(tuple):
        looks = 0

        def __len__(self):
            Group.looks += 1
            return super().__len__()

    generation = Generation(lambda rid: None)
    generation.hold([Group("ab"), Group("c")])
    held = Group.looks
    for left in (2, 1):
        generation.wake(True)
        generation.wake(False)
        assert not generation._done.is_set(), left
    generation.wake(True)
    assert generation._done.is_set()
    assert Group.looks == held
