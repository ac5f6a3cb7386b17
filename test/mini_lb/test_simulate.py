"""The simulation: the proxy's own policies under a virtual clock, figures that can be checked by hand, and what they promise."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from radixpd.errors import ConfigError
from radixpd.mini_lb.balance import POLICIES, Policy
from radixpd.mini_lb.dispatch import Dispatcher
from radixpd.mini_lb.simulate import Figures, SimulateSettings, Simulation, main, wanted
from radixpd.mini_lb.snapshot import Candidate, Choice, RouteAsk, Situation, WorkerSnapshot
from radixpd.mini_lb.trace import Arrival, generate, read

PUBLISHED = Path(__file__).parents[3] / "shared/data/mooncake_conversation_trace.jsonl"
TRACE = generate(1500, seed=0)
SMALL = SimulateSettings(sim_workers=4, sim_blocks=3000, sim_tokens_per_s=16_000)
PAIRS = SimulateSettings(sim_workers=4, sim_decode_workers=2, sim_step_ms=20, sim_row_ms=0.5, slo_ttft_ms=20_000, slo_tpot_ms=50)


def _run(settings: SimulateSettings = SMALL, trace: list[Arrival] = TRACE, **changes: object) -> Figures:
    return Simulation(replace(settings, **changes)).run(trace)  # type: ignore[arg-type]


def test_figures_by_hand() -> None:
    """One worker of 1,000 tokens/s: a miss, a hit behind it, a miss when it is idle again."""
    trace = [Arrival(0.0, 1000, 1, (0, 1)), Arrival(0.5, 1500, 1, (0, 1, 2)), Arrival(10.0, 512, 1, (9,))]
    figures = _run(trace=trace, sim_workers=1, sim_tokens_per_s=1000.0)
    # First tokens after 1.0 s; .5 s of rest and 1500 - 1024 tokens; .512 s.
    assert figures.ttft_mean_s == pytest.approx((1.0 + 0.5 + 0.476 + 0.512) / 3)
    assert figures.hit_rate == pytest.approx(2 / 6)
    assert (figures.requests, figures.rejected, figures.good, figures.imbalance) == (3, 0, 3, 1.0)


def test_blocks_leave_a_cache_tail_first() -> None:
    """The cache holds four blocks: of the older prompt its head stays."""
    trace = [Arrival(0.0, 1536, 1, (0, 1, 2)), Arrival(10.0, 1024, 1, (8, 9)), Arrival(20.0, 1536, 1, (0, 1, 2))]
    assert _run(trace=trace, sim_workers=1, sim_blocks=4).hit_rate == pytest.approx(2 / 8)


def test_a_request_that_is_cached_whole_still_costs_a_token() -> None:
    trace = [Arrival(0.0, 512, 1, (0,)), Arrival(5.0, 512, 1, (0,))]
    figures = _run(trace=trace, sim_workers=1, sim_tokens_per_s=512.0)
    assert figures.ttft_mean_s == pytest.approx((1 + 1 / 512) / 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_decides_in_the_simulation(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands in the table under the policy's name is asked for every request, and obeyed."""
    asked = Counter[str]()

    def always_w2(ask: RouteAsk, workers: Sequence[WorkerSnapshot], situation: Situation) -> Choice:
        asked[policy] += 1
        assert [worker.name for worker in workers] == ["w0", "w1", "w2", "w3"]
        return Choice("w2", "for a test", candidates=(Candidate("w2", 0.0),))

    monkeypatch.setitem(POLICIES, policy, Policy(always_w2, POLICIES[policy].hits))
    figures = _run(policy=policy, trace=TRACE[:200])
    assert asked[policy] == 200
    assert figures.imbalance == pytest.approx(4.0)


def test_the_dispatcher_of_the_proxy_keeps_the_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Counter[str]()
    for name in ("pick", "dispatched"):
        original = getattr(Dispatcher, name)

        def counted(self: Dispatcher, *args: object, name: str = name, original: object = original) -> object:
            calls[name] += 1
            return original(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(Dispatcher, name, counted)
    simulation = Simulation(SMALL)
    simulation.run(TRACE[:100])
    assert calls == {"pick": 100, "dispatched": 100}
    assert all(line.in_flight == 0 for line in simulation._dispatcher._lines.values())


def test_the_index_of_the_dispatcher_knows_what_the_caches_hold() -> None:
    simulation = Simulation(SMALL)
    simulation.run(TRACE)
    for name, worker in simulation._prefills.items():
        assert simulation._dispatcher.known.held(name) == len(worker._cache) <= SMALL.sim_blocks


def test_the_same_seed_gives_the_same_figures() -> None:
    assert _run(trace=TRACE[:300]) == _run(trace=TRACE[:300])
    assert _run(trace=TRACE[:300], policy="random") != _run(trace=TRACE[:300], policy="random", seed=1)


def test_kv_cost_is_quicker_than_balance_alone_and_hits_more() -> None:
    """Enough load that queues form."""
    figures = {policy: _run(policy=policy, sim_tokens_per_s=9000.0) for policy in ("kv_cost", "least_backlog", "random")}
    cost, backlog = figures["kv_cost"], figures["least_backlog"]
    assert cost.hit_rate > 1.5 * backlog.hit_rate
    assert cost.ttft_mean_s < 0.9 * backlog.ttft_mean_s < 0.9 * figures["random"].ttft_mean_s
    assert cost.ttft_p99_s <= 1.05 * backlog.ttft_p99_s
    assert cost.imbalance <= 1.3


@pytest.mark.full
def test_the_published_trace() -> None:
    """The promise: hits, balance, and times against least_backlog."""
    if not PUBLISHED.exists():
        pytest.skip("the published trace is not beside the project")
    settings = SimulateSettings(sim_workers=10, sim_blocks=5859, sim_tokens_per_s=8000)
    trace = read(str(PUBLISHED))
    cost, backlog = _run(settings, trace), _run(settings, trace, policy="least_backlog")
    assert cost.hit_rate >= 0.32
    assert cost.imbalance <= 1.3
    assert cost.ttft_mean_s <= 0.77 * backlog.ttft_mean_s
    assert cost.ttft_p99_s <= backlog.ttft_p99_s


def test_pairs_share_long_prompts_and_not_short_ones() -> None:
    trace = [Arrival(30.0 * at, 100 if at % 2 else 8000, 20, tuple(range(100 * at, 100 * at + (1 if at % 2 else 16)))) for at in range(40)]
    figures = _run(PAIRS, trace)
    assert figures.apart == 20
    assert figures.good == 40


def test_early_rejection_pays_under_overload() -> None:
    """Twice what the workers can do: without it everything is late."""
    figures = {rule: _run(PAIRS, early_rejection=rule, sim_speedup=8.0) for rule in ("off", "current", "predicted")}
    assert figures["off"].rejected == 0
    assert figures["predicted"].rejected > 300
    assert figures["predicted"].goodput_per_s >= 1.2 * figures["off"].goodput_per_s
    assert figures["predicted"].goodput_per_s >= 0.8 * figures["current"].goodput_per_s  # it is the more careful one
    assert figures["predicted"].load_correlation > -0.3  # the two loads do not swing against each other
    assert figures["predicted"].good + figures["predicted"].rejected <= 1500


def test_rejection_does_not_lock_itself_in() -> None:
    """An overload that ends: later requests are served again."""
    burst = [Arrival(0.01 * at, 6000, 300, tuple(range(20 * at, 20 * at + 12))) for at in range(400)]
    calm = [Arrival(600.0 + 10 * at, 2000, 50, tuple(range(10**6 + 10 * at, 10**6 + 10 * at + 4))) for at in range(30)]
    figures = _run(PAIRS, burst + calm, early_rejection="predicted")
    alone = _run(PAIRS, burst, early_rejection="predicted")
    assert figures.rejected == alone.rejected > 100


def test_a_simulation_is_recognised_by_its_flags() -> None:
    assert wanted(["--simulate", "x"])
    assert wanted(["--generate-trace=x", "--seed", "1"])
    assert not wanted(["--worker-urls", "http://simulate"])


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    assert main(["--generate-trace", str(path), "--sim-requests", "50", "--seed", "2"]) == 0
    flags = ["--sim-workers", "3", "--sim-blocks", "500", "--sim-tokens-per-s", "20000", "--policy", "least_backlog"]
    assert main(["--simulate", str(path), *flags, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {"hit_rate", "imbalance", "ttft_mean_s", "ttft_p99_s", "rejected"} <= printed.keys()
    assert printed["requests"] == 50
    assert main(["--simulate", str(path), *flags]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == printed.keys()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--simulate", "x", "--sim-workers", "0"], "sim-workers"),
        (["--simulate", "x", "--policy", "magic"], "policy"),
        (["--simulate", "x", "--early-rejection", "predicted"], "--slo-ttft-ms"),
        (["--simulate", "x", "--sim-wokers", "3"], "--sim-workers"),
        (["--simulate", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_bad_flags_are_named(flags: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        main(flags)


def test_figures_are_plain_numbers() -> None:
    json.dumps(asdict(_run(trace=TRACE[:10])))
