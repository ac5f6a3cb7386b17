"""The shapes of what a server says of itself and of the orders it was given; see `answers`.

Used by the modules with those routes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from radixpd.config.resolve import KVEvents
from radixpd.core.journey import Journey
from radixpd.core.load import LoadSnapshot
from radixpd.core.whereabouts import Part
from radixpd.server.answers import FinishReason


class Health(TypedDict):
    """Whether requests are taken."""

    status: Literal["ok", "starting", "ready", "draining", "failed", "unresponsive"]


class ModelInfo(TypedDict):
    """The model; `tokenizer_path` is the folder of plain tokenizer files, for clients on this machine."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: Literal[True]
    has_chat_template: bool
    context_length: int
    vocab_size: int


class ServerInfo(TypedDict):
    """Besides these, every setting under its flag's name, and the sizes that were derived. `incarnation` is another one after every
    restart; `model_fingerprint` names weights and precision, `text_identity` tokenizer and chat template: page hashes depend on both."""

    version: str
    incarnation: str
    role: Literal["regular", "prefill", "decode"]
    model_fingerprint: str
    text_identity: str
    tokenizer_directory: str
    kv_events: KVEvents | None
    status: str
    default_sampling_params: dict[str, dict[str, Any]]
    load: LoadSnapshot
    internal_states: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ServerLoad(LoadSnapshot):
    """The load, of which process, in which role."""

    incarnation: str = ""
    role: Literal["regular", "prefill", "decode"] = "regular"


class Flushed(TypedDict):
    """The cache is empty."""

    success: Literal[True]


class Paused(TypedDict):
    """The runner is still."""

    success: Literal[True]


class Switched(TypedDict):
    """The role that the server has now, and the one that it had."""

    role: Literal["prefill", "decode"]
    before: Literal["prefill", "decode"]


class Continued(TypedDict):
    """Requests run again."""

    success: Literal[True]


class Aborted(TypedDict):
    """How many outputs were open and are being ended."""

    aborted: int


class RequestState(TypedDict):
    """Where a live request is: in which `part` of its way, for how many seconds (`since`), and whom it `waits_for` (a peer's name, or one
    of its own server's parts). With `rid` null: a room or quarantined pages that no request here stands for."""

    rid: str | None
    part: Part
    since: float
    waits_for: str
    phase: Literal["parked", "waiting", "running", "sending"] | None
    age: float | None
    room: int | None
    peer: str | None
    slot: int | None
    pages: int
    attempt: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


class JourneyAnswer(TypedDict):
    """One output of a request: `whereabouts` while it is `live`, `kv_journey` once its prompt is computed, `finish_reason` at the end."""

    id: str
    live: bool
    whereabouts: RequestState | None
    finish_reason: FinishReason | None
    kv_journey: Journey | None


class PageOwners(TypedDict):
    """Pages of the pool; `locked` are some of the tree's; into those in `quarantine` a peer may still write."""

    total: int
    free: int
    tree: int
    locked: int
    request: int
    quarantine: int


class PageMap(TypedDict):
    """Owners in the order of page ids: runs of cells, each an index into `owners` and a number of cells."""

    pages_per_cell: int
    runs: list[tuple[int, int]]


class CacheNode(TypedDict):
    """A node of the radix tree: `age` counts look-ups of the tree since its last use, `head` is its first token ids."""

    id: int
    parent: int | None
    namespace: str
    tokens: int
    pages: int
    locks: int
    hits: int
    age: int
    children: int
    preview: str | None
    head: list[int] | None


class CacheTree(TypedDict):
    """The cache at a moment: parents before children; `texts`: whether previews and heads are told."""

    page_size: int
    pages: PageOwners
    owners: list[str]
    page_map: PageMap
    texts: bool
    nodes: list[CacheNode]
    hidden_pages: int


class LogSettings(TypedDict):
    """`/configure_logging`: how it is now."""

    log_level: str
    log_requests: bool
    log_requests_level: int
    log_requests_format: Literal["text", "json"]


class ProfileStarted(TypedDict):
    """`/start_profile`."""

    num_steps: int


class ProfileWritten(TypedDict):
    """`/stop_profile`: where the trace lies on the server's machine."""

    path: str


class Frozen(TypedDict):
    """`/freeze_gc`: objects that each process's collector leaves alone from now on."""

    api: int
    scheduler: int
    runner: int
