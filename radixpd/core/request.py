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

from radixpd.core.journey import Trail
from radixpd.core.page_hash import token_bytes

if TYPE_CHECKING:
    from radixpd.core.handoff import Room
    from radixpd.core.radix_tree import TreeNode
    from radixpd.core.step import PromptScores

__all__ = ["MOVES", "Finish", "Grammar", "LogprobParams", "Phase", "Request", "SamplingParams", "sample_seed"]

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
class Grammar:
    """What an output must be. `ebnf`: a text of this grammar; `tags`: free text in which certain beginnings open a part with a grammar of
    its own (JSON, see `grammar.requests`). Written by the door alone."""

    kind: Literal["ebnf", "tags"]
    text: str


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
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int = 0
    grammar: Grammar | None = None
    logprobs: LogprobParams | None = None

    @property
    def may_jump(self) -> bool:
        """Whether tokens that the grammar forces may come without being sampled: nobody asks what the model thinks of them."""
        return self.grammar is not None and self.logprobs is None


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
    Phase.PARKED: frozenset({Phase.WAITING, Phase.RUNNING, Phase.FINISHED}),
    Phase.WAITING: frozenset({Phase.RUNNING, Phase.FINISHED}),
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.SENDING, Phase.FINISHED}),
    Phase.SENDING: frozenset({Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """One sample of one client request, from arrival to its terminal effect.

    `tokens` is what had to be computed when the request last joined the queue: the prompt, after a retraction also the output so
    far. While it holds a slot, the growing counts live in the scheduler's `SlotTable`. `lock` pins the tree nodes that hold its
    first pages.
    """

    rid: str
    tokens: np.ndarray  # int32 [prompt_length + output so far]
    prompt_length: int
    params: SamplingParams
    space: bytes = b""
    priority: int = 0
    arrived: float = 0.0
    order: int = 0  # arrival number: ties are broken by it
    sample: int = 0
    leader: Request | None = None  # sample 0, while this one still waits for the fork
    siblings: tuple[Request, ...] = ()  # samples 1 .. n-1, carried by sample 0 until the fork
    phase: Phase = Phase.WAITING
    attempt: int = 0
    slot: int = NO_SLOT
    lock: TreeNode | None = None
    scored: int = 0  # prompt positions below this need no log-probability (any more)
    since: float = 0.0  # when it came to where it is now
    trail: Trail = field(default_factory=Trail)  # its way so far
    prefilled: bool = False  # `Prefilled` has been sent
    room: Room | None = None  # where it is handed over; None: served here from prompt to last token
    read_by_peer: bool = False  # a mover reads its pages: none is given up before the end, and it is never retracted
    handed_scores: list[PromptScores] = field(default_factory=list)  # for the decode server, with the first token
    overtaken: int = 0  # requests that arrived later and were admitted before it
    data: bytes = b""  # `tokens` as the radix tree reads them

    def __post_init__(self) -> None:
        self.data = token_bytes(self.tokens)

    @property
    def samples(self) -> tuple[Request, ...]:
        """This request and the siblings that it still carries."""
        return (self, *self.siblings)

    @property
    def pinned(self) -> bool:
        """A mover reads its pages, or those of the sample that it waits for: it goes on to its end in this attempt."""
        return (self.leader or self).read_by_peer

    @property
    def length_limit(self) -> int:
        """Tokens, prompt included, at which the request ends by length."""
        return self.prompt_length + self.params.max_new_tokens

    @property
    def matchable(self) -> int:
        """Tokens that may come from the cache: the last one is always computed, and so is what still needs a log-probability."""
        scored = self.scored if self.scored < self.prompt_length else len(self.tokens)
        return min(len(self.tokens), scored) - 1

    def requeue(self, tokens: np.ndarray) -> None:
        """Back to the queue after a retraction, with everything known so far as the prompt of the next attempt."""
        self.attempt += 1
        self.tokens = tokens
        self.data = token_bytes(tokens)
        self.move(Phase.WAITING)

    def move(self, phase: Phase) -> None:
        """Change phase along the table of legal moves."""
        assert phase in MOVES[self.phase], f"{self.rid}: {self.phase} -> {phase}"
        self.phase = phase


def sample_seed(seed: int, sample: int) -> int:
    """The seed of sample `sample` of a request: 63 bits of SHA-256 over both, so that samples never share randomness."""
    digest = hashlib.sha256(seed.to_bytes(8, "little", signed=True) + sample.to_bytes(4, "little")).digest()
    return int.from_bytes(digest[:8], "little") >> 1
