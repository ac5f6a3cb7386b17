"""The messages of a conversation: what they may hold, and the prompt that they become.

Calls in earlier turns are shown to the template as they are: what a client sends back may be what a model wrote, broken or not. Called by
the chat and the tokenize routes, and by the offline `LLM`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixpd.errors import BadRequest
from radixpd.runtime.admission import refuse_later
from radixpd.server.docs import Schema, or_null, ref
from radixpd.server.service import Service
from radixpd.text.chat import render_arguments

__all__ = ["MESSAGES", "ROLES", "rendered"]

MAX_MESSAGES = 4096
MAX_CALLS = 128  # of one message
ROLES = ("system", "developer", "user", "assistant", "tool")
LATER_ROLES = ("function",)
TEXT_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
CALL: Schema = {
    "type": "object",
    "properties": {
        "id": or_null({"type": "string"}),
        "type": {"enum": ["function", None]},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": ["string", "object", "null"]}},
            "required": ["name"],
        },
    },
    "required": ["function"],
}
MESSAGES: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "allOf": [ref("Unserved")],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": or_null({"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}]}),
            "tool_calls": or_null({"type": "array", "items": CALL, "maxItems": MAX_CALLS, "description": "of an assistant's message"}),
            "tool_call_id": or_null({"type": "string", "description": "of a tool's message"}),
        },
        "required": ["role"],
        "anyOf": [
            {"properties": {"role": {"const": "assistant"}}},
            {"properties": {"tool_calls": or_null({"type": "array", "maxItems": 0})}},
        ],
    },
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
}


async def rendered(
    service: Service,
    messages: list[dict[str, Any]],
    *,
    generation: bool | None = None,
    continued: bool = False,
    continues: tuple[str, ...] = ("assistant",),
    template_kwargs: dict[str, Any] | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
    tool_choice: Any = None,
) -> str:
    """The prompt text of a conversation. `continued`: it ends with the last message's text, which is by one of `continues`."""
    _check_messages(messages)
    if continued and generation:
        raise BadRequest("add_generation_prompt and continue_final_message exclude each other", param="continue_final_message")
    if continued and messages[-1]["role"] not in continues:
        raise BadRequest("continue_final_message needs an assistant message at the end", param="continue_final_message")
    arguments = render_arguments(
        messages, generation=generation, continued=continued, template_kwargs=template_kwargs, tools=tools, tool_choice=tool_choice
    )
    return await service.manager.render(**arguments)


def _check_messages(messages: list[dict[str, Any]]) -> None:
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise BadRequest(f"messages must hold between 1 and {MAX_MESSAGES} messages, got {len(messages)}", param="messages")
    for index, message in enumerate(messages):
        role, where = message.get("role"), f"messages[{index}]"
        refuse_later(message, where, chat=True)
        if role in LATER_ROLES:
            raise BadRequest(f"{where}.role {role} is not served by this server", param="messages", code="unsupported_field")
        if role not in ROLES:
            raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}, got {str(role)[:40]!r}", param="messages")
        if message.get("tool_calls") is not None:
            _check_calls(message, where)
        if not isinstance(message.get("tool_call_id"), str | None):
            raise BadRequest(f"{where}.tool_call_id must be a text", param="messages")


def _check_calls(message: dict[str, Any], where: str) -> None:
    calls = message["tool_calls"]
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise BadRequest(f"{where}.tool_calls must be a list of at most {MAX_CALLS} calls", param="messages")
    if calls and message["role"] != "assistant":
        raise BadRequest(f"{where}.tool_calls: only an assistant's message has calls", param="messages")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"{where}.tool_calls[{index}].function.name must be a text", param="messages")
        if not isinstance(function.get("arguments"), str | dict | None):
            raise BadRequest(f"{where}.tool_calls[{index}].function.arguments must be a text or an object", param="messages")
        if call.get("type") not in (None, "function") or not isinstance(call.get("id"), str | None):
            raise BadRequest(f"{where}.tool_calls[{index}] must have type function and an id that is a text", param="messages")
