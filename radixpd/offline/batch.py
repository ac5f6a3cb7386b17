"""What one call of `LLM` asks for: prompts or conversations, admitted one by one with the words of `/generate`.

A field holds one value for all prompts or a list with one for each, as in the route. Invariant: what is wrong is a `BadRequest` before
anything starts; in a list it says which prompt is meant. A misspelt name is refused here, where a server would warn and go on: who wrote
the program is the one who reads it. Called by `runs`, in the caller's thread.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from radixpd.errors import BadRequest
from radixpd.runtime.admission import Ask, Sampling, admit, read, refuse_later
from radixpd.runtime.tokenizer_manager import TokenizerManager
from radixpd.server.batch import check_rid, pick, pick_all, pick_room
from radixpd.server.native_api import PER_PROMPT, SHARED, GenerateBody, token_ids

__all__ = ["Batch", "Conversation", "Messages", "Prompts", "admit_conversations", "admit_prompts", "naming"]

Prompts = str | Sequence[int] | Sequence[str | Sequence[int]]
Messages = Sequence[Mapping[str, Any]]
OPTIONS = tuple(name for name in GenerateBody.__struct_fields__ if name not in ("text", "input_ids", "sampling_params", "stream"))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that the chat template turns into a prompt, and how."""

    messages: list[dict[str, Any]]
    rendering: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """The admitted prompts of one call; those of `conversations` are still to be rendered. `many`: its result is a list."""

    asks: tuple[Ask, ...]
    many: bool
    texts: bool = False
    prompt_ids: bool = False
    conversations: tuple[Conversation, ...] = field(default=())

    @property
    def samples(self) -> int:
        """Outputs."""
        return sum(ask.params.n for ask in self.asks)


@contextmanager
def naming(index: int, many: bool) -> Iterator[None]:
    """A `BadRequest` inside says which prompt of the list it is about."""
    try:
        yield
    except BadRequest as error:
        if not many:
            raise
        raise BadRequest(f"prompt {index}: {error}", param=error.param, code=error.code, status=error.status) from None


def admit_prompts(
    manager: TokenizerManager,
    prompts: Prompts | None,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
) -> Batch:
    """Prompts in any of their forms."""
    if (prompts is None) == (input_ids is None):
        raise BadRequest("give either prompts or input_ids", param="prompts")
    items, many = _items(input_ids if prompts is None else prompts)
    body = _body(sampling, options)
    asks = []
    for index, item in enumerate(items):
        with naming(index, many):
            asks.append(_ask(manager, body, item if isinstance(item, str) else _ids(item), index, len(items) if many else None))
    return _batch(body, asks, many=many)


def admit_conversations(
    manager: TokenizerManager,
    messages: Messages | Sequence[Messages],
    sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
    rendering: Mapping[str, Any],
) -> Batch:
    """One conversation, or a list of them. Their messages are checked when they are rendered."""
    given = list(messages) if isinstance(messages, list | tuple) else messages
    many = isinstance(given, list) and bool(given) and not isinstance(given[0], Mapping)
    talks = [Conversation(_messages(talk), rendering) for talk in (given if many else [given])]
    body = _body(sampling, options)
    asks = []
    for index in range(len(talks)):
        with naming(index, many):
            asks.append(_ask(manager, body, None, index, len(talks) if many else None))
    return _batch(body, asks, many=many, conversations=tuple(talks))


def _batch(body: GenerateBody, asks: list[Ask], *, many: bool, conversations: tuple[Conversation, ...] = ()) -> Batch:
    rids = [ask.rid for ask in asks if ask.rid is not None]
    if len(set(rids)) < len(rids):
        raise BadRequest("rid holds a name twice", param="rid", code="duplicate_rid")
    return Batch(
        tuple(asks),
        many or any(ask.params.n > 1 for ask in asks),
        body.return_text_in_logprobs is True,
        body.return_prompt_token_ids is True,
        conversations,
    )


def _items(given: Any) -> tuple[list[Any], bool]:
    """The prompts, and whether they came as a list."""
    if isinstance(given, str):
        return [given], False
    items = _listed(given)
    if items is None:
        raise BadRequest(f"prompts must be a text, token ids, or a list of either, got {type(given).__name__}", param="prompts")
    if items and all(not isinstance(item, str) and _listed(item) is None for item in items):
        return [items], False
    return items, True


def _messages(talk: Any) -> list[dict[str, Any]]:
    if not isinstance(talk, list | tuple) or not all(isinstance(message, Mapping) for message in talk):
        raise BadRequest("messages must be a list of dicts with role and content, or a list of such lists", param="messages")
    return [dict(message) for message in talk]


def _listed(value: Any) -> list[Any] | None:
    """A list, tuple or array as a list."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None


def _ids(item: Any) -> list[int]:
    tokens = _listed(item)
    if tokens is None:
        raise BadRequest(f"a prompt is a text or token ids, got {type(item).__name__}", param="prompts")
    try:
        if not any(isinstance(token, bool) for token in tokens):
            return [operator.index(token) for token in tokens]
    except TypeError:
        pass
    raise BadRequest("input_ids: token ids are integers", param="input_ids")


def _body(sampling: Any, options: Mapping[str, Any]) -> GenerateBody:
    refuse_later(options)
    _check_names(options, OPTIONS, "option")
    for params in sampling if isinstance(sampling, list | tuple) else [sampling or {}]:
        if not isinstance(params, Mapping):
            raise BadRequest(
                f"sampling_params must be a dict, or a list with one for each prompt, got {sampling!r}"[:300], param="sampling_params"
            )
        refuse_later(params)
        _check_names(params, Sampling.__struct_fields__, "sampling parameter")
    return read(GenerateBody, {**options, "sampling_params": sampling})


def _check_names(given: Iterable[str], known: Sequence[str], what: str) -> None:
    for name in given:
        if not isinstance(name, str):
            raise BadRequest(f"the name of a {what} is a text, got {name!r}"[:300])
        if name not in known:
            nearest = max(known, key=lambda each: difflib.SequenceMatcher(None, name, each).ratio())
            raise BadRequest(f"there is no {what} {name}; the nearest is {nearest}", param=name)


def _ask(manager: TokenizerManager, body: GenerateBody, prompt: str | list[int] | None, index: int, count: int | None) -> Ask:
    """One admitted prompt; None: a conversation, whose prompt comes later."""
    check_rid(body.rid, count)
    options = pick_all({name: getattr(body, name) for name in PER_PROMPT}, index, count)
    options |= {name: getattr(body, name) for name in SHARED}
    options["token_ids_logprob"] = token_ids(body.token_ids_logprob, index, count)
    sampling: dict[str, Any] = pick(body.sampling_params, index, count, "sampling_params") or {}
    options |= pick_room(body, index, count, sampling.get("n"))
    return admit(
        "" if prompt is None else prompt,
        sampling,
        options,
        limits=manager.limits,
        names={"text": "messages"} if prompt is None else {} if isinstance(prompt, str) else {"text": "input_ids"},
        defaults=manager.defaults.chat if prompt is None else manager.defaults.native,
        special=prompt is not None,
    )
