"""kv_cost against round_robin before real servers: `python -m benchmark.bench_fleet [--model-path demo] [--part whole|pairs|all]`.

*whole*: two servers that answer whole requests. *pairs*: two prefill and two decode servers. Before each a load balancer with either policy
in turn, and through it two workloads of `bench_serving`: shared prefixes and conversations, from empty caches. Printed: the share of prompt
tokens that came from a cache, and times to first token. The servers publish KV events, so kv_cost goes by what they have. One thread a
server: wants as many cores as servers. Exit code 2 when it could not start.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmark.pd_servers import BY_HAND
from benchmark.processes import environment, free_port, healthy, knows_all, running, wait_until
from radixpd.errors import ConfigError, RadixpdError

__all__ = ["Run", "main", "workload"]

START = 600.0  # seconds for servers to be ready
RUN = 3600.0  # for one workload
POOL = "16384"  # tokens of each server
POLICIES = ("round_robin", "kv_cost")


@dataclass(frozen=True, slots=True)
class Run:
    """One workload through one balancer."""

    part: str
    workload: str
    policy: str
    hit_rate: float
    mean_ttft_ms: float
    p99_ttft_ms: float
    completed: int
    failed: int


def workload(name: str, scale: float) -> list[str]:
    """Flags of `bench_serving`."""
    if name == "shared prefixes":
        each = max(1, round(6 * scale))
        sizes = [
            "--gsp-num-groups",
            "6",
            "--gsp-prompts-per-group",
            str(each),
            "--gsp-system-prompt-len",
            "512",
            "--gsp-question-len",
            "32",
        ]
        return ["--dataset-name", "generated-shared-prefix", *sizes, "--gsp-output-len", "8", "--max-concurrency", "4"]
    clients = max(1, round(6 * scale))
    sizes = ["--num-clients", str(clients), "--num-rounds", "4", "--request-length", "128", "--output-length", "8"]
    return ["--dataset-name", "multi-turn", *sizes, "--max-concurrency", "4"]


def measure(part: str, model: str, scale: float) -> Iterator[Run]:
    """All runs of one part; the servers stay up."""
    with ExitStack() as stack:
        names = ["regular"] * 2 if part == "whole" else ["prefill", "prefill", "decode", "decode"]
        servers = [stack.enter_context(_server(model, role)) for role in names]
        for url, _, process in servers:
            wait_until(partial(healthy, url), "a server", process, seconds=START, why=lambda: BY_HAND)
        for policy in POLICIES:
            with _balancer(policy, [(role, url, port) for role, (url, port, _) in zip(names, servers)]) as url:
                for name in ("shared prefixes", "conversations"):
                    yield _serve(part, name, policy, url, workload(name, scale))


def _serve(part: str, name: str, policy: str, url: str, flags: list[str]) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "runs.jsonl"
        command = [sys.executable, "-m", "benchmark.bench_serving", "--base-url", url, "--flush-cache", "--disable-tqdm", *flags]
        try:
            done = subprocess.run([*command, "--output-file", str(lines)], capture_output=True, text=True, env=environment(), timeout=RUN)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"bench_serving did not end within {RUN:g} s") from None
        if done.returncode:
            raise ConfigError(f"bench_serving ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
        figures = json.loads(lines.read_text().splitlines()[-1])
    failed = sum(figures["errors"].values())
    ttft = (figures["mean_ttft_ms"], figures["p99_ttft_ms"])
    return Run(part, name, policy, figures["cache_hit_rate"], *ttft, figures["completed"], failed)


@contextmanager
def _server(model: str, role: str) -> Iterator[tuple[str, int, subprocess.Popen[bytes]]]:
    """One server: its URL, its port for handoffs, its process."""
    port, bootstrap = free_port(), free_port()
    events = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{free_port()}", "replay_endpoint": f"tcp://127.0.0.1:{free_port()}"}
    flags = ["--threads", "1", "--max-total-tokens", POOL, "--kv-events-config", json.dumps(events)]
    if role != "regular":
        flags += ["--disaggregation-mode", role]
    if role == "prefill":
        flags += ["--disaggregation-bootstrap-port", str(bootstrap)]
    command = [sys.executable, "-m", "radixpd.launch_server", "--model-path", model, "--port", str(port), *flags]
    with running(command) as process:
        yield f"http://127.0.0.1:{port}", bootstrap, process


@contextmanager
def _balancer(policy: str, servers: Sequence[tuple[str, str, int]]) -> Iterator[str]:
    """The balancer's URL, once it knows all servers, and their caches where it goes by them."""
    port, flags = free_port(), list[str]()
    for role, url, bootstrap in servers:
        flags += {"regular": ["--worker-urls", url], "prefill": ["--prefill", url, str(bootstrap)], "decode": ["--decode", url]}[role]
    command = [sys.executable, "-m", "radixpd.mini_lb", "--port", str(port), "--policy", policy, *flags]
    with running(command) as process:
        base = f"http://127.0.0.1:{port}"
        wait_until(partial(knows_all, base, exact=policy == "kv_cost"), "the balancer", process, seconds=START, why=lambda: BY_HAND)
        yield base


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures; the exit code."""
    parser = argparse.ArgumentParser(prog="bench_fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--part", choices=("whole", "pairs", "all"), default="all")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    asked = parser.parse_args(argv)
    if not 0.01 <= asked.scale <= 1000:
        parser.error("--scale is from 0.01 to 1000")
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{platform.processor() or platform.machine()}, {cores} cores, load average {load:.1f} at the start", flush=True)
    print(f"{'part':6} {'workload':16} {'policy':12} hit rate  TTFT mean ms  p99 ms  completed  failed", flush=True)
    try:
        for part in ("whole", "pairs"):
            for run in measure(part, asked.model_path, asked.scale) if asked.part in (part, "all") else ():
                times = f"{run.mean_ttft_ms:13.0f} {run.p99_ttft_ms:7.0f}"
                print(
                    f"{part:6} {run.workload:16} {run.policy:12} {run.hit_rate:8.1%} {times} {run.completed:10} {run.failed:7}", flush=True
                )
    except ConfigError as error:
        print(f"bench_fleet: error: {error}", file=sys.stderr)
        return 2
    except RadixpdError as error:
        print(f"bench_fleet: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started ends, too
    sys.exit(main())
