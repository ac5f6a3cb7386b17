"""The shapes of what is generated, of models, tokens and errors, as types: `/openapi.json` shows them, and tests hold real answers to them.

Invariant: a field that is always there is required; nothing is answered that is not named here, or, of the server itself, in
`state_answers`. Used by the modules with routes.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from radixpd.core.journey import Journey

Triple = tuple[float | None, int, str | None]  # log-probability, token id, its text if asked for


class Failure(TypedDict):
    """What went wrong: `param` is the field, `code` a stable word or the status."""

    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "overloaded_error", "server_error"
    ]
    param: str | None
    code: str | int


class ErrorAnswer(TypedDict):
    """The one error shape of all routes; in a stream an event."""

    error: Failure


class FinishReason(TypedDict):
    """Why an output ended: `matched` with stop, `length` with length, `message` and `status_code` with abort."""

    type: Literal["stop", "length", "abort"]
    matched: NotRequired[int | str | None]
    length: NotRequired[int]
    message: NotRequired[str]
    status_code: NotRequired[int]


class MetaInfo(TypedDict):
    """About one output of `/generate`. Lists of log-probabilities are there when asked for, the journey with the end."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    kv_journey: NotRequired[Journey]
    input_token_logprobs: NotRequired[list[Triple]]
    input_top_logprobs: NotRequired[list[list[Triple] | None]]
    input_token_ids_logprobs: NotRequired[list[list[Triple] | None]]
    output_token_logprobs: NotRequired[list[Triple]]
    output_top_logprobs: NotRequired[list[list[Triple] | None]]
    output_token_ids_logprobs: NotRequired[list[list[Triple] | None]]


class Generated(TypedDict):
    """One output of `/generate`; in a stream the output so far."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: NotRequired[list[int]]
    index: NotRequired[int]


class CachedTokens(TypedDict):
    """Prompt tokens that came from the cache."""

    cached_tokens: int


class CompletionDetails(TypedDict):
    """Generated tokens that are no answer."""

    reasoning_tokens: int


class UsageCount(TypedDict):
    """Tokens of one request; its journey (one for each output) where a header asks for it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[CachedTokens]
    completion_tokens_details: NotRequired[CompletionDetails]
    kv_journey: NotRequired[Journey | list[Journey]]


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One text; in a stream what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]
    finish_reason: Literal["stop", "length"] | None
    matched_stop: NotRequired[int | str | None]


class Completion(TypedDict):
    """The answer of `/v1/completions`; in a stream one chunk."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageCount | None]


class ChatToken(TypedDict):
    """A token as a client may want to see it."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatLogprob(TypedDict):
    """One token of an answer with its alternatives."""

    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[ChatToken]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a message."""

    content: list[ChatLogprob]
    refusal: None


class CalledFunction(TypedDict):
    """What is called: `arguments` is JSON, unless the output was cut short or the model broke it."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One call that the client is to make."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatAnswer(TypedDict):
    """The assistant's message: `content` is null where it only calls, `reasoning_content` there with a reasoning parser."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    token_ids: NotRequired[list[int]]
    finish_reason: Literal["stop", "length", "tool_calls"]
    matched_stop: int | str | None


class ChatCompletion(TypedDict):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    prompt_token_ids: NotRequired[list[int]]
    choices: list[ChatChoice]
    usage: UsageCount


class CalledFunctionDelta(TypedDict):
    """What is new of a call: its name, once, and more of its arguments."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """What is new of the call number `index`; its id and type come with its name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunctionDelta


class ChatDelta(TypedDict):
    """What is new of a message."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    """What is new of one answer; the last one has no text but the finish reason."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    token_ids: NotRequired[list[int]]
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    matched_stop: NotRequired[int | str | None]


class ChatChunk(TypedDict):
    """One chunk of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    prompt_token_ids: NotRequired[list[int]]
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageCount | None]


class ModelCard(TypedDict):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(TypedDict):
    """All served models: one."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(TypedDict):
    """Ids of a text, or of each text of a list."""

    tokens: list[int | list[int]]
    count: int | list[int]
    token_strings: NotRequired[list[str | list[str]]]
    max_model_len: int


class Detokenized(TypedDict):
    """The text of ids, or of each list of ids; `prompt` (vLLM's name) always spells special tokens out: it stands for the same ids."""

    text: str | list[str]
    prompt: str | list[str]


class TokenizerInfo(TypedDict):
    """The tokenizer's special tokens as texts, the default chat template, and the longest prompt."""

    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    vocab_size: int
    model_max_length: int
