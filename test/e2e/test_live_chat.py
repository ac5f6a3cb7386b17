"""Chat templates and messages.

Each test names the case of the project's list of field reports that it stands for; the default server must be alive after each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.asks import chat, refused
from e2e.servers import Server, tiny_chat_model

pytestmark = pytest.mark.usefixtures("alive")


def test_ct_01_a_template_may_refuse(odd: Server) -> None:
    answer = chat(odd, [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}])
    assert answer.status == 400
    assert "no system messages, please" in answer.json["error"]["message"]
    assert chat(odd, [{"role": "user", "content": "hi"}]).status == 200


@pytest.mark.parametrize("text", ["OK! ", "OK!\n", "OK!", " ", ""])
def test_ct_02_ct_03_any_message_can_be_continued_twice(server: Server, text: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
    first, second = (chat(server, messages, continue_final_message=True, add_generation_prompt=False, echo=False) for _ in range(2))
    assert first.status == second.status == 200
    assert first.json["choices"] == second.json["choices"]
    # The prompt ends with exactly that text: as many byte tokens as it has, after the same head.
    empty = chat(server, [*messages[:1], {"role": "assistant", "content": ""}], continue_final_message=True).json["usage"]["prompt_tokens"]
    assert first.json["usage"]["prompt_tokens"] == empty + len(text)


def test_ct_04_a_model_without_template(tmp_path: Path) -> None:
    base = Server(tiny_chat_model(tmp_path, template=False), "--max-total-tokens", "1024", "--threads", "1")
    answer = chat(base, [{"role": "user", "content": "hi"}])
    assert answer.status == 400
    assert "--chat-template" in answer.json["error"]["message"]
    assert base.post("/v1/completions", {"prompt": "hi", "max_tokens": 2}).status == 200
    assert base.close() == 0


def test_ct_05_a_last_message_by_the_assistant(server: Server) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert chat(server, messages).status == 200
    refused(server, "/v1/chat/completions", {"messages": messages, "add_generation_prompt": True, "continue_final_message": True})
    refused(server, "/v1/chat/completions", {"messages": messages[:1], "continue_final_message": True})


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{}],
        [{"role": "king", "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "audio"}]}],
        "hi",
        [[]],
    ],
)
def test_ct_messages_that_are_none(server: Server, messages: Any) -> None:
    refused(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
