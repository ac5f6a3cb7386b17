"""Chat messages -> the prompt text, by the model's own Jinja template in a sandbox.

Invariant: nothing that a template or a message does escapes as anything but `BadRequest` (the template's own words) at render time, or
`ConfigError` at load time. Called by the chat routes through the tokenizer manager, and by the offline `LLM`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from radixpd.errors import BadRequest, ConfigError
from radixpd.text.history import shown_calls
from radixpd.text.tokenizer_config import read_json, read_tokenizer_config

__all__ = ["ChatTemplate", "load_chat_template", "render_arguments"]

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# What a template can raise because of the messages that it was given.
RENDER_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class ChatTemplate:
    """`named`: template name -> source; "default" must be there, "tool_use" serves requests with tools where present. `origins`: template
    name -> the file that it was read from, for messages. `source` is the default template's text."""

    def __init__(self, named: Mapping[str, str], special_tokens: Mapping[str, str], *, origins: Mapping[str, str] | None = None) -> None:
        environment = _environment()
        self._templates: dict[str, jinja2.Template] = {}
        self._reads_parts: dict[str, bool] = {}
        self._special_tokens = dict(special_tokens)
        self.source = named["default"]
        for name, source in named.items():
            try:
                self._templates[name] = environment.from_string(source)
                self._reads_parts[name] = _reads_parts(environment.parse(source))
            except jinja2.TemplateError as error:
                shown = (origins or {}).get(name, repr(name))
                raise ConfigError(f"the chat template {shown} is no valid Jinja ({error}); see --chat-template") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. With `continue_final_message` it ends exactly with the last message's text, blanks included."""
        extra = dict(template_kwargs or {})
        if taken := sorted(RESERVED & extra.keys()):
            raise BadRequest(f"chat_template_kwargs may not set {', '.join(taken)}", param="chat_template_kwargs")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        chat = [_plain_message(message, flatten=not self._reads_parts[name]) for message in messages]
        if not chat:
            raise BadRequest("messages is empty; at least one message is needed", param="messages")

        def run(messages: list[dict[str, Any]], generation: bool) -> str:
            values = {**self._special_tokens, **extra, "messages": messages, "tools": tools or None, "documents": None}
            return self._run(name, {**values, "add_generation_prompt": generation})

        return _continued(run, chat) if continue_final_message else run(chat, add_generation_prompt)

    def _run(self, name: str, values: dict[str, Any]) -> str:
        try:
            return self._templates[name].render(values)
        except RENDER_ERRORS as error:
            raise BadRequest(f"the chat template refused these messages: {error}", param="messages") from error


def render_arguments(
    messages: Sequence[Mapping[str, Any]],
    *,
    generation: bool | None,
    continued: bool,
    template_kwargs: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: Any = None,
) -> dict[str, Any]:
    """What a chat request means to `ChatTemplate.render`: for the servers, and for a load balancer that must render as they do. Tools
    that may not be called are not shown."""
    return {
        "messages": [{**message, "role": "system"} if message.get("role") == "developer" else message for message in messages],
        "add_generation_prompt": not continued and generation is not False,
        "continue_final_message": continued,
        "tools": None if tool_choice == "none" else tools,
        "template_kwargs": template_kwargs,
    }


def load_chat_template(directory: str | Path, *, override: str | None = None) -> ChatTemplate | None:
    """The template of a model directory, or the file `override`; None when the model has none."""
    folder = Path(directory)
    config = read_tokenizer_config(folder)
    found = _sources(folder, config.chat_template)
    if override is not None:
        try:
            found = {"default": (Path(override).read_text(encoding="utf-8"), override)}
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"--chat-template {override}: the file cannot be read ({reason})") from error
    if "default" not in found:
        return None
    named = {name: source for name, (source, _) in found.items()}
    return ChatTemplate(named, config.named, origins={name: origin for name, (_, origin) in found.items()})


def _sources(folder: Path, configured: Any) -> dict[str, tuple[str, str]]:
    """Template name -> source and the file it is from; a file of its own wins over the one inside tokenizer_config.json."""
    found: dict[str, tuple[str, str]] = {}
    inside = {"chat_template.json": read_json(folder / "chat_template.json").get("chat_template"), "tokenizer_config.json": configured}
    for origin, value in inside.items():
        if isinstance(value, str):
            found["default"] = value, origin
        elif isinstance(value, list):
            found.update({str(item["name"]): (str(item["template"]), f"{item['name']} in {origin}") for item in value})
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8"), file.name
    if (folder / "chat_template.jinja").is_file():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8"), "chat_template.jinja"
    return found


def _plain_message(message: Mapping[str, Any], *, flatten: bool) -> dict[str, Any]:
    """A message with text content only: parts are checked, and joined where the template expects a string."""
    if not isinstance(message, Mapping):
        raise BadRequest("messages: every message must be an object with role and content", param="messages")
    plain = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in plain:
        plain["tool_calls"] = shown_calls(plain["tool_calls"])
    content = plain.setdefault("content", "")
    if isinstance(content, str):
        return plain
    if not isinstance(content, Sequence):
        raise BadRequest("messages: content must be a string or a list of parts", param="messages")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise BadRequest(f"messages: content parts of type {kind!r} are not supported; this model reads text only", param="messages")
        if not isinstance(part.get("text"), str):
            raise BadRequest("messages: the text of a content part must be a string", param="messages")
    plain["content"] = " ".join(part["text"] for part in content) if flatten else [dict(part) for part in content]
    return plain


def _continued(run: Callable[[list[dict[str, Any]], bool], str], chat: list[dict[str, Any]]) -> str:
    """Render up to the end of the last message's text.

    A mark put behind the text shows where it ends. A template that changes the text (trims it, say) is run once more with the mark
    alone, to find where the text begins.
    """
    last = chat[-1]
    text = last["content"] if isinstance(last["content"], str) else last["content"][-1]["text"] if last["content"] else ""
    mark = "@CONTINUE@"
    while mark in json.dumps(chat, ensure_ascii=False, default=str):
        mark += "@"
    for body, tail in ((text + mark, ""), (mark, text)):
        content = body if isinstance(last["content"], str) else [*last["content"][:-1], {"type": "text", "text": body}]
        head, found, _ = run([*chat[:-1], {**last, "content": content}], False).rpartition(mark)
        if found and (head + tail).endswith(text):
            return head + tail
    raise BadRequest("continue_final_message: the chat template does not show the last message's text", param="continue_final_message")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; for serving it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML; prompts want plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _reads_parts(tree: jinja2.nodes.Template) -> bool:
    """Whether the template itself walks a list of content parts (`for part in message.content`)."""
    for loop in tree.find_all(jinja2.nodes.For):
        match loop.iter:
            case jinja2.nodes.Getattr(attr="content") | jinja2.nodes.Name(name="content"):
                return True
            case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
                return True
    return False
