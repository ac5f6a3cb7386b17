"""The request: what was asked (`SamplingParams`), how it ends (`Finish`), and the one mutable entity of the brain (`Request`).

Invariants: lengths are derived, never stored; a request moves only along `MOVES`; `attempt` grows by one with each retraction,
so whatever an earlier attempt still has in flight can be told apart and dropped. The scheduler alone mutates a `Request`.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from radixpd.core.radix_tree import TreeNode

__all__ = ["MOVES", "Finish", "LogprobParams", "Phase", "Request", "SamplingParams", "sample_seed"]

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class LogprobParams:
    """Which log-probabilities a request wants.

    `start`: first prompt position whose token is scored; -1 scores no prompt token. `top`: alternatives per position.
    `token_ids`: ids whose log-probability is reported at every position.
    """

    top: int = 0
    start: int = -1
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated sampling parameters of one request; the admission function is the only place that builds them.

    `temperature` 0 means greedy (argmax). `top_k` -1 means all. `seed` is always set: admission draws one where the client
    gave none, so a token depends only on (logits, seed, sample index, position) and survives retraction.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int = 0
    logprobs: LogprobParams | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a request ended. `matched` is the token id or the stop string of a `stop`; `status` the HTTP status of an `abort`."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str = ""
    status: int = 200


class Phase(enum.Enum):
    """Where a request is. PARKED: a role holds it back. SENDING: computed, its KV still leaves for a peer."""

    PARKED = "parked"
    WAITING = "waiting"
    RUNNING = "running"
    SENDING = "sending"
    FINISHED = "finished"


MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.PARKED: frozenset({Phase.WAITING, Phase.FINISHED}),
    Phase.WAITING: frozenset({Phase.RUNNING, Phase.FINISHED}),
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.SENDING, Phase.FINISHED}),
    Phase.SENDING: frozenset({Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """One sample of one client request, from arrival to its terminal message.

    `prompt` and `output` are what the client sees; the tokens to compute are both together (`tokens`), also after a retraction.
    Pages `[0, shared)` of `pages` belong to the radix tree and are held by `lock`; the rest belong to this request.
    """

    rid: str
    prompt: np.ndarray  # int32 [prompt_length]
    params: SamplingParams
    namespace: bytes = b""
    priority: int = 0
    arrived: float = 0.0
    sample: int = 0
    siblings: tuple[Request, ...] = ()  # samples 1 .. n-1, carried by sample 0 until the fork
    phase: Phase = Phase.WAITING
    attempt: int = 0
    slot: int = NO_SLOT
    output: list[int] = field(default_factory=list)
    computed: int = 0  # positions whose KV every plan so far covers
    sampled: int = 0  # output tokens asked for so far, including the ones still in flight
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    lock: TreeNode | None = None
    scored: int = 0  # prompt positions below this have had their log-probabilities sent
    cached: int = 0  # prompt tokens found in the cache by the first attempt
    finish: Finish | None = None
    overtaken: int = 0
    stamps: dict[str, float] = field(default_factory=dict)
    page_hashes: list[bytes] = field(default_factory=list)

    @property
    def known(self) -> int:
        """Tokens whose ids the brain knows: prompt and applied output."""
        return len(self.prompt) + len(self.output)

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and output so far, int32 `[known]`."""
        if not self.output:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.output, dtype=np.int32)])

    def move(self, phase: Phase) -> None:
        """Change phase along the table of legal moves."""
        assert phase in MOVES[self.phase], f"{self.rid}: {self.phase} -> {phase}"
        self.phase = phase


def sample_seed(seed: int, sample: int) -> int:
    """The seed of sample `sample` of a request: 63 bits of SHA-256 over both, so that samples never share randomness."""
    digest = hashlib.sha256(seed.to_bytes(8, "little", signed=True) + sample.to_bytes(4, "little")).digest()
    return int.from_bytes(digest[:8], "little") >> 1
