"""Every message between processes: msgspec tagged structs in msgpack. Arrays travel as raw bytes (see `links`), never as tensors.

API process -> scheduler: `Generate`, `Refused`, `Abort`, `Stop`, `Control`, `Shutdown`.
Scheduler -> API process: `Batch` of client effects, `Load`, `Reply`, `Failed`, `RunnerReady`.  The first `Load` means: ready.
Scheduler -> runner: `Step`, `Want`, `Forget`, `Control`, `Shutdown`.  Runner -> scheduler: `RunnerReady`, `Stepped`, `Made`, `Reply`,
`Failed`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from radixpd.core.effects import Finished, Prefilled, PromptScored, TokensOut
from radixpd.core.handoff import Room
from radixpd.core.load import LoadSnapshot
from radixpd.core.request import Grammar, SamplingParams
from radixpd.core.step import StepPlan, StepResult

__all__ = [
    "Abort", "Batch", "Control", "Failed", "Forget", "FromApi", "FromRunner", "FromScheduler", "Generate", "Load", "Made", "Refused",
    "Reply", "RunnerReady", "Shutdown", "Step", "Stepped", "Stop", "ToRunner", "Want",
]  # fmt: skip


class Generate(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Compute one prompt and sample `len(rids)` outputs from it (`rids[i]` is sample i; every rid is unique while it lives). `room`: where
    it is handed over between servers, if it is."""

    rids: tuple[str, ...]
    prompt: np.ndarray  # int32 [prompt_length]
    params: SamplingParams
    namespace: bytes
    priority: int
    arrived: float  # time.monotonic() of the machine
    room: Room | None = None


class Refused(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A prompt that names this room was turned away: whoever waits for it on another server should know."""

    room: Room
    reason: str
    status: int


class Abort(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """End this request wherever it is. Unknown rids are ignored: the answer and the abort may cross."""

    rid: str
    message: str = "aborted by the client"
    status: int = 499


class Stop(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The detokenizer matched a stop string: the request ends with its first `keep` output tokens."""

    rid: str
    keep: int
    matched: str


class Control(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A question or order outside the request stream, answered by one `Reply` with the same `id`.

    Actions: `flush_cache`, `state` (counters, page owners, waiting and running requests), `cache_tree` (a `core.tree_view.CacheView`),
    `pause_abort`, `pause_retract`, `pause_in_place` (answered when no step is in flight), `continue`, `switch_role` (when nothing is open).
    """

    id: int
    action: str
    args: dict[str, Any] = {}
    to: Literal["scheduler", "runner"] = "scheduler"  # the scheduler passes the runner's on, and its replies back


class Batch(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """All client effects of one turn of the scheduler's loop, by kind: prefills and scores precede tokens, tokens precede ends."""

    prefilled: tuple[Prefilled, ...] = ()
    scored: tuple[PromptScored, ...] = ()
    tokens: tuple[TokensOut, ...] = ()
    finished: tuple[Finished, ...] = ()


class Load(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """State of the scheduler, sent when it changed (at most every 50 ms while busy, at once when it turns idle)."""

    load: LoadSnapshot


class Reply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Answer to a `Control`. `error` is empty on success."""

    id: int
    body: dict[str, Any]
    error: str = ""


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The sender is about to exit: every open request ends with `message`."""

    message: str


class Step(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Run one plan. `ended`: rooms whose pages this step, or a later one, may write into: nothing of them may be sent any more."""

    plan: StepPlan
    ended: tuple[int, ...] = ()


class Want(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Make a grammar ready, and keep it so until `Forget`. Answered by one `Made` with the same `id`."""

    id: int
    grammar: Grammar


class Forget(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Nobody uses this grammar any more."""

    grammar: Grammar


class Made(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A wanted grammar is ready, or (`error`) cannot be; `status` is what the client is told with it."""

    id: int
    error: str = ""
    status: int = 400


class Stepped(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One plan has run."""

    result: StepResult


class RunnerReady(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The runner has loaded weights and touched its pool: `pages` pages of `page_size` tokens. `layout`: of its KV, with its fingerprint;
    `endpoints`: where other servers can write into it, by transport."""

    pages: int
    page_size: int
    fingerprint: str
    load_seconds: float
    layout: dict[str, Any] = {}
    endpoints: dict[str, dict[str, Any]] = {}


class Shutdown(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Finish what is queued and exit 0."""


FromApi = Generate | Refused | Abort | Stop | Control | Shutdown
FromScheduler = Batch | Load | Reply | Failed | RunnerReady
ToRunner = Step | Want | Forget | Control | Shutdown
FromRunner = RunnerReady | Stepped | Made | Reply | Failed
