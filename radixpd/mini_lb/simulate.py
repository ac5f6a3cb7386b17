"""`--simulate TRACE`: a trace against virtual workers under a virtual clock, with the very dispatcher and policies of the proxy.

Aggregated workers by default; with `--sim-decode-workers` the `--sim-workers` only prefill and the others generate. With limits set,
requests may be refused at the door: by the decode load predicted for the end of their prefill (`--early-rejection predicted`), by the
present one, or not at all; goodput counts answers that kept both limits. No wall clock, no I/O but trace and figures. Called by `__main__`.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import msgspec

from radixpd.config.cli import parse_as
from radixpd.config.settings import flag
from radixpd.errors import ConfigError
from radixpd.mini_lb.admission import Slo
from radixpd.mini_lb.balance import POLICIES
from radixpd.mini_lb.dispatch import Account, Dispatcher
from radixpd.mini_lb.feed import Change
from radixpd.mini_lb.snapshot import DecodeModel, RouteAsk, Tuning, WorkerSnapshot
from radixpd.mini_lb.trace import BLOCK_TOKENS, Arrival, generate, read, write
from radixpd.mini_lb.virtual import VirtualDecode, VirtualPrefill

__all__ = ["Figures", "SimulateSettings", "Simulation", "main", "wanted"]

CHOICES = tuple(POLICIES)
SAMPLE_S = 10.0  # between two looks at the loads
EPSILON_S = 1e-6


@dataclass(frozen=True, slots=True)
class SimulateSettings:
    """A trace against virtual workers."""

    simulate: str | None = flag(None, "trace to replay, in Mooncake's columns")
    generate_trace: str | None = flag(None, "file to write a trace to that behaves like Mooncake's conversation trace")
    sim_requests: int = flag(12_031, "requests of the trace, at most", low=1, high=10**7)
    sim_workers: int = flag(10, "virtual workers", low=1, high=1024)
    sim_decode_workers: int = flag(0, "virtual decode workers; with any, --sim-workers prefill only", low=0, high=1024)
    sim_blocks: int = flag(5859, f"blocks of {BLOCK_TOKENS} tokens in each worker's cache", low=1, high=10**9)
    sim_tokens_per_s: float = flag(8000.0, "prompt tokens that a worker computes in a second", low=1e-3, high=1e9)
    sim_step_ms: float = flag(20.0, "a decode step of one request", low=0.001, high=1e5)
    sim_row_ms: float = flag(0.0, "what each further request adds to a decode step", low=0, high=1e5)
    sim_speedup: float = flag(1.0, "how many times faster than recorded requests come", low=1e-3, high=1e3)
    slo_ttft_ms: float = flag(0.0, "longest time to first token that counts as good; 0 for no limit", low=0, high=1e9)
    slo_tpot_ms: float = flag(0.0, "longest mean time per output token that counts as good; 0 for no limit", low=0, high=1e9)
    early_rejection: str = flag("off", "refuse at the door what would miss a limit", choices=("off", "current", "predicted"))
    policy: str = flag("kv_cost", "who gets the next request", choices=CHOICES)
    prefill_policy: str | None = flag(None, "the same for the prefill half; default: --policy", choices=CHOICES)
    decode_policy: str | None = flag(None, "the same for the decode half; default: --policy", choices=CHOICES)
    seed: int = flag(0, "of ties, random policies and generated traces", low=0, high=2**62)
    json: bool = flag(False, "print the figures as one JSON object")


@dataclass(frozen=True, slots=True)
class _Root:
    simulation: SimulateSettings = SimulateSettings()


@dataclass(frozen=True, slots=True)
class Figures:
    """What a replay came to. `imbalance`: tokens computed by the busiest worker over the mean; loads are shares of the limits."""

    policy: str
    requests: int
    hit_rate: float
    imbalance: float
    ttft_mean_s: float
    ttft_p99_s: float
    rejected: int
    good: int  # answers within both limits
    goodput_per_s: float
    apart: int  # requests that two workers shared
    prefill_load: tuple[float, float]  # mean and standard deviation over time
    decode_load: tuple[float, float]
    load_correlation: float  # of the two: near -1 when they swing against each other


@dataclass(slots=True, eq=False)
class _Live:
    """A request under way."""

    arrival: Arrival
    arrived: float
    account: Account
    prefill: str
    decode: str
    cached: int = 0
    computed_s: float = 0.0
    first: float = 0.0


@dataclass(slots=True)
class _Tally:
    """What is counted on the way."""

    ttfts: list[float] = field(default_factory=list)
    loads: list[tuple[float, float]] = field(default_factory=list)
    hits: int = 0
    blocks: int = 0
    rejected: int = 0
    good: int = 0
    apart: int = 0


class Simulation:
    """One replay."""

    def __init__(self, settings: SimulateSettings, tuning: Tuning | None = None) -> None:
        self._settings = settings
        self._dispatcher = Dispatcher(
            settings.policy,
            prefill_policy=settings.prefill_policy,
            decode_policy=settings.decode_policy,
            tuning=tuning,
            seed=settings.seed,
        )
        apart = settings.sim_decode_workers > 0
        roles = {f"w{i}": "prefill" if apart else "regular" for i in range(settings.sim_workers)}
        roles |= {f"d{i}": "decode" for i in range(settings.sim_decode_workers)}
        tokens = settings.sim_blocks * BLOCK_TOKENS
        self._workers = [
            WorkerSnapshot(name, role=role, events=True, kv_tokens=tokens, free_tokens=tokens)  # type: ignore[arg-type]
            for name, role in roles.items()
        ]
        model = DecodeModel((settings.sim_step_ms - settings.sim_row_ms) / 1000, settings.sim_row_ms / 1000)
        self._prefills = {name: VirtualPrefill(settings.sim_blocks, settings.sim_tokens_per_s) for name in roles}
        self._decodes: dict[str, VirtualDecode[_Live]] = {name: VirtualDecode(model) for name in roles}
        self._feeds = {name: self._dispatcher.feed(name) for name in roles}
        self._slo = Slo(settings.slo_ttft_ms / 1000, settings.slo_tpot_ms / 1000)
        self._tuning = self._dispatcher.tuning
        self._tally = _Tally()
        self._events: list[tuple[float, int, str, _Live]] = []  # (time, order, what, whose)
        self._order = 0
        self._next_look = 0.0

    def run(self, arrivals: Sequence[Arrival]) -> Figures:
        """All of a trace, to the end of the last answer."""
        for arrival in arrivals:
            now = arrival.time / self._settings.sim_speedup
            self._until(now)
            self._look(now)
            self._arrive(arrival, now)
        self._until(math.inf)
        return self._figures(len(arrivals), now or 1.0)

    def _arrive(self, arrival: Arrival, now: float) -> None:
        ask = RouteAsk(tokens=arrival.tokens, pages=arrival.blocks, page_size=BLOCK_TOKENS)
        choice = self._dispatcher.pick(ask, self._workers, now)
        rule = self._settings.early_rejection
        if rule != "off" and self._dispatcher.refusal(choice, self._slo, now, predict=rule == "predicted"):
            self._tally.rejected += 1
            return
        live = _Live(arrival, now, self._dispatcher.dispatched(ask, choice, now), choice.worker, choice.decode or choice.worker)
        computed = self._prefills[live.prefill].compute(now, arrival.tokens, arrival.blocks)
        self._tell(live.prefill, computed.changes, now)
        live.cached = computed.hits * BLOCK_TOKENS
        live.computed_s = computed.tokens / self._settings.sim_tokens_per_s
        if live.decode == live.prefill:
            self._decodes[live.decode].stall(now, live.computed_s)
        self._tally.hits += computed.hits
        self._tally.blocks += len(arrival.blocks)
        self._tally.apart += choice.disaggregated
        self._push(computed.first, "computed", live)

    def _until(self, now: float) -> None:
        """Everything that happens up to `now`."""
        while self._events and self._events[0][0] <= now:
            at, _, kind, live = heapq.heappop(self._events)
            if kind == "computed":
                self._computed(live, at)
            elif kind == "begins":
                self._begins(live, at)
            else:
                self._ends(live.decode, at)

    def _computed(self, live: _Live, now: float) -> None:
        if live.decode == live.prefill:
            self._begins(live, now)
            return
        live.account.prefilled(now)
        changes = self._prefills[live.decode].store(live.arrival.blocks)
        self._tell(live.decode, changes, now)
        missing = sum(len(change.pages) for change in changes if change.stored) * BLOCK_TOKENS
        move_s = missing * self._tuning.bytes_per_token / self._tuning.link_bytes_per_s
        hidden_s = self._tuning.overlap * live.computed_s
        self._push(now + self._tuning.handoff_s + max(0.0, move_s - hidden_s), "begins", live)

    def _begins(self, live: _Live, now: float) -> None:
        """The first token is there."""
        live.first = now
        live.account.first_token(now, live.cached)
        self._tally.ttfts.append(now - live.arrived)
        self._decodes[live.decode].begin(now, max(live.arrival.output - 1, 0), live)
        self._schedule(live)

    def _ends(self, worker: str, now: float) -> None:
        """The first one of a batch is through, unless others have joined and slowed it down."""
        batch = self._decodes[worker]
        due = batch.next_end()
        if due is None or due > now + EPSILON_S:
            return
        live = batch.end(now)
        live.account.done(now, output_tokens=live.arrival.output)
        tpot_s = (now - live.first) / max(live.arrival.output - 1, 1)
        within = (self._slo.ttft_s or math.inf, self._slo.tpot_s or math.inf)
        self._tally.good += live.first - live.arrived <= within[0] and tpot_s <= within[1] + EPSILON_S
        if batch.rows:
            self._schedule(live)

    def _schedule(self, live: _Live) -> None:
        due = self._decodes[live.decode].next_end()
        assert due is not None
        self._push(due, "ends", live)

    def _push(self, at: float, kind: str, live: _Live) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, kind, live))

    def _tell(self, worker: str, changes: list[Change], now: float) -> None:
        """A batch of cache events, as a worker publishes them."""
        feed = self._feeds[worker]
        feed.live(feed.next, changes, now)

    def _look(self, now: float) -> None:
        """Note the loads, as shares of their limits."""
        if now < self._next_look:
            return
        self._next_look = now + SAMPLE_S
        prompts = [worker.backlog_s(now) for name, worker in self._prefills.items() if not name.startswith("d")]
        batches = [batch.step_s() for name, batch in self._decodes.items() if name.startswith("d") or not self._settings.sim_decode_workers]
        limits = (self._slo.ttft_s or 1.0, self._slo.tpot_s or 1.0)
        self._tally.loads.append((statistics.fmean(prompts) / limits[0], statistics.fmean(batches) / limits[1]))

    def _figures(self, requests: int, seconds: float) -> Figures:
        tally, ttfts = self._tally, sorted(self._tally.ttfts)
        computed = [worker.computed for name, worker in self._prefills.items() if worker.computed or not name.startswith("d")]
        prompts, batches = zip(*tally.loads)
        return Figures(
            policy=self._settings.policy,
            requests=requests,
            hit_rate=tally.hits / max(tally.blocks, 1),
            imbalance=max(computed) / (statistics.fmean(computed) or 1.0),
            ttft_mean_s=statistics.fmean(ttfts) if ttfts else 0.0,
            ttft_p99_s=ttfts[int(0.99 * len(ttfts))] if ttfts else 0.0,
            rejected=tally.rejected,
            good=tally.good,
            goodput_per_s=tally.good / seconds,
            apart=tally.apart,
            prefill_load=(statistics.fmean(prompts), statistics.pstdev(prompts)),
            decode_load=(statistics.fmean(batches), statistics.pstdev(batches)),
            load_correlation=_correlation(prompts, batches),
        )


def wanted(argv: Sequence[str]) -> bool:
    """Whether a command line asks for a simulation instead of a server."""
    return any(word.partition("=")[0] in ("--simulate", "--generate-trace") for word in argv)


def main(argv: Sequence[str]) -> int:
    """Run what the command line asks for; the exit code."""
    about = "Replay a trace against virtual workers, or write one."
    settings = parse_as(_Root, argv, program="radixpd.mini_lb", usage="--simulate TRACE [flags]", about=about).simulation
    if settings.early_rejection != "off" and not (settings.slo_ttft_ms or settings.slo_tpot_ms):
        raise ConfigError(f"--early-rejection {settings.early_rejection} needs --slo-ttft-ms or --slo-tpot-ms")
    if settings.generate_trace is not None:
        write(settings.generate_trace, generate(settings.sim_requests, settings.seed))
    if settings.simulate is not None:
        figures = asdict(Simulation(settings).run(read(settings.simulate, settings.sim_requests)))
        lines = [f"{name:16} {_plain(value)}" for name, value in figures.items()]
        print(msgspec.json.encode(figures).decode() if settings.json else "\n".join(lines))
    return 0


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(_plain(each) for each in value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    if len(first) < 2 or statistics.pstdev(first) == 0 or statistics.pstdev(second) == 0:
        return 0.0
    return statistics.correlation(first, second)
