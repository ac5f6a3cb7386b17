"""What a choice sees and what it says: workers as they look now, the request that asks, the answer with its reasons.

Immutable records, no behaviour beyond derived figures: policies are functions of these alone, so that proxy and simulation share them.
Lengths are tokens, times are seconds. `fleet` (or the simulator) fills in what workers report; `dispatch` adds what it sent and they have
not yet reported, and what each has cached of the prompt at hand.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

__all__ = [
    "NO_HITS",
    "Candidate",
    "Choice",
    "DecodeModel",
    "Hits",
    "PrefillModel",
    "Role",
    "RouteAsk",
    "Situation",
    "Tuning",
    "WorkerSnapshot",
]

Role = Literal["regular", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Seconds that a worker takes for prompts: `a + b*sum(n) + c*sum(n^2)`, fitted online by `fit`."""

    a: float = 0.005
    b: float = 0.0001
    c: float = 0.0

    def seconds(self, new: int, cached: int = 0) -> float:
        """For one prompt of `cached + new` tokens; attention of the new ones over all costs (cached + new)^2 - cached^2."""
        return self.a + self.work(new, cached)

    def work(self, new: int, cached: int = 0) -> float:
        """`seconds` without the fixed part."""
        return self.b * new + self.c * new * (new + 2 * cached)


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """Seconds of one decode step with `rows` running requests that hold `tokens` of KV."""

    base: float = 0.005
    per_row: float = 0.0002
    per_token: float = 0.0

    def step(self, rows: float, tokens: int) -> float:
        """Time per output token in such a batch."""
        return self.base + self.per_row * rows + self.per_token * tokens


@dataclass(frozen=True, slots=True)
class Hits:
    """Tokens of a prompt that a worker has: `device` from the pool it computes from, `host` those after them in an offload tier.

    `exact`: from the worker's own events; else from what was sent there before.
    """

    device: int = 0
    host: int = 0
    exact: bool = False

    @property
    def tokens(self) -> int:
        """All that need not be computed."""
        return self.device + self.host


NO_HITS = Hits()


class WorkerSnapshot(NamedTuple):
    """One worker; a tuple, since every choice makes one for each.

    `name` is unique and stays over restarts. `usable`: healthy, circuit not open, not draining.
    Reported by the worker: running, waiting, max_running, kv_tokens, free_tokens. From `dispatch`: all that follows.
    """

    name: str
    url: str = ""
    role: Role = "regular"
    usable: bool = True
    events: bool = False  # publishes KV events, so that the exact index knows its cache
    running: int = 0  # requests that hold a slot
    waiting: int = 0  # requests without one
    max_running: int = 0  # slots; 0 for unknown
    kv_tokens: int = 0  # of the KV pool; 0 for unknown
    free_tokens: int = 0  # of them, free or only cached
    in_flight: int = 0  # requests sent there whose answer has not ended, and those of others as last reported
    queued_tokens: int = 0  # uncached prompt tokens ahead of a new request
    queued_s: float = 0.0  # how long they will still take
    used_tokens: int = 0  # of the KV pool by requests, also those that are still on their way
    recent_s: float = 0.0  # seconds of work sent there of late, older work counting less
    room_tokens: int | None = None  # that its cache can take before something must go; None for unknown
    idle_s: float = 0.0  # for how long what would go first has not been used
    hits: Hits = NO_HITS
    prefill: PrefillModel = PrefillModel()
    decode: DecodeModel = DecodeModel()


@dataclass(frozen=True, slots=True)
class RouteAsk:
    """A request that wants a worker. `pages`: event ids of its full pages of `page_size` tokens, already chained on its namespace.

    `prompt` is the text (or token bytes) for the approximate tree, under `namespace`; both may be empty where nothing is known.
    """

    rid: str = ""
    tokens: int = 0
    pages: tuple[int, ...] = ()
    page_size: int = 16
    prompt: bytes = b""
    namespace: bytes = b""
    user: str = ""  # the body's field
    session: str = ""  # what consistent_hash keeps together: a header, else the user
    output_tokens: int = 0  # how many it is expected to write; 0 for unknown
    stream: bool = True  # the first token will be seen when it comes; of a plain answer only the end is seen


@dataclass(frozen=True, slots=True)
class Tuning:
    """Numbers that policies are tuned by. The first three are those of SGLang's router."""

    cache_threshold: float = 0.3  # cache_aware follows a match of a larger share of the prompt
    balance_abs_threshold: int = 64  # and drops affinity where requests in flight differ by more than this
    balance_rel_threshold: float = 1.5  # and by more than this factor
    work_weight: float = 1.25  # computing delays whoever comes later, so it costs more than its own time
    hidden: float = 0.5  # of what looks like a fixed cost of a prompt is the work of its tokens: times are noisy
    hidden_output: float = 0.1  # the same of what looks like the time of a plain answer's output
    evict_weight: float = 0.75  # worth of evicted tokens, as a share of computing them
    host_share: float = 0.1  # loading a page back from the host tier, as a share of computing it
    imbalance_soft: float = 0.25  # price of a worker's recent work over the mean, as a share of computing the prompt
    imbalance_bound: float = 1.1  # over the mean by this factor
    imbalance_noise: float = 0.5  # standard deviations of work that came by chance, which no worker pays for
    imbalance_hard: float = 2.0  # and the excess costs this, times the prefix's heat
    hot: float = 20.0  # requests with the same prefix that count as heat
    handoff_s: float = 0.005  # that a handoff takes beside the bytes
    link_bytes_per_s: float = 1e9  # between prefill and decode servers
    bytes_per_token: float = 100e3  # of KV
    overlap: float = 0.8  # share of a prefill's time in which its pages travel for free
    stall: float = 0.1  # what a second of prefill at a decode server costs each request that it stalls
    alone_tokens: int = 1024  # a decode server computes no more of a prompt than this, where there are prefill servers


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy may use besides ask and workers. `turn` counts the choices made so far."""

    turn: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(0))
    heat: float = 0.0  # recent requests that shared as much of a prefix as this one
    tuning: Tuning = Tuning()


class Candidate(NamedTuple):
    """One worker (or one pair) that was considered: `ttft_s` is the sum of the parts, `score` what was compared (lower wins)."""

    worker: str
    score: float
    decode: str = ""
    hits: Hits = NO_HITS
    decode_hits: Hits = NO_HITS
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0  # wait for a slot and for KV memory, and one decode step
    tpot_s: float = 0.0  # time per output token there
    evict_s: float = 0.0  # worth of what must go from the cache
    imbalance_s: float = 0.0  # price of a worker that has had more than its share

    @property
    def ttft_s(self) -> float:
        """Estimated time to first token."""
        return self.queue_s + self.prefill_s + self.transfer_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Choice:
    """Who computes the prompt (`worker`) and, where that is somebody else, who generates (`decode`). `candidates[0]` is the chosen one."""

    worker: str
    reason: str
    decode: str = ""
    candidates: tuple[Candidate, ...] = field(default=())

    @property
    def chosen(self) -> Candidate:
        """The estimates of the chosen worker or pair."""
        return self.candidates[0]

    @property
    def disaggregated(self) -> bool:
        """Whether two workers share the request."""
        return bool(self.decode)
