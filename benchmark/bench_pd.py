"""What a handoff costs: `python -m benchmark.bench_pd [--model-path demo] [--tokens 2048] [--repeats 5] [--part wire|overlap|all]`.

*wire*: seconds that a prompt's KV takes at 25, 100, 200 and 400 Gbps, predicted from its bytes for two model shapes, and measured between
two pools over a link paced to that speed, as far as this machine's fastest path goes.
*overlap*: two servers over tcp on a link so slow that the whole transfer takes as long as the prefill. The visible transfer is the time
from prefill's first token to decode's first own token, less decode's median step; with overlap and without, as a share of the transfer.
Needs a quiet machine with two cores. Exit code 2 when it could not start.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmark.pd_servers import Asked, Pair
from benchmark.pd_transfer import SHAPES, Wire, predicted, prompt_bytes
from radixpd.errors import ConfigError, RadixpdError
from radixpd.kv.layout import KVLayout

__all__ = ["Overlap", "main", "measure_overlap", "wire_rows"]

SPEEDS = (25.0, 100.0, 200.0, 400.0)  # Gbps
PATHS = ("shm", "tcp")
OUTPUT = 17  # tokens of each answer
FLAGS = ("--disaggregation-transfer-backend", "tcp", "--max-total-tokens", "32768")
VOCABULARY = range(1000, 40_000)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Medians over requests, in seconds. `transfer`: what the bytes take on the paced link; `step`: decode's."""

    gbps: float
    prefill: float
    transfer: float
    step: float
    visible: float

    @property
    def share(self) -> float:
        """Of the transfer that the client waits for."""
        return self.visible / self.transfer


def wire_rows(tokens: int, repeats: int) -> list[str]:
    """One line for each shape and speed."""
    rows = []
    for name, layout in SHAPES.items():
        fastest = {path: _measured(layout, tokens, path, 0.0, repeats) for path in PATHS}
        path = min(fastest, key=lambda each: fastest[each])
        limit = prompt_bytes(layout, tokens) * 8 / fastest[path] / 1e9
        rows.append(f"{name}: {prompt_bytes(layout, tokens) / 2**20:.1f} MiB; unpaced " + ", ".join(
            f"{each} {seconds * 1e3:.1f} ms" for each, seconds in fastest.items()
        ) + f"; fastest path here {path}, {limit:.1f} Gbps")  # fmt: skip
        for gbps in (*(speed for speed in (5.0, 10.0) if speed < limit), *SPEEDS):
            expected = predicted(layout, tokens, gbps)
            line = f"  {gbps:5.0f} Gbps: predicted {expected * 1e3:8.1f} ms"
            if gbps < limit:
                seconds = _measured(layout, tokens, path, gbps, repeats)
                line += f", measured {seconds * 1e3:8.1f} ms ({(seconds / expected - 1) * 100:+.1f} %)"
            else:
                line += ", beyond this machine"
            rows.append(line)
    return rows


def _measured(layout: KVLayout, tokens: int, path: str, gbps: float, repeats: int) -> float:
    with Wire.open(layout, tokens, path, gbps) as wire:
        return wire.seconds(repeats)


def measure_overlap(model: str, tokens: int, repeats: int) -> tuple[Overlap, Overlap]:
    """With overlap, and without. Prompts are random, so that no cache helps."""
    numbers = random.Random(1)
    with Pair.start(model, FLAGS) as pair:
        asked = _ask(pair, numbers, tokens, repeats)
    prefill = statistics.median(each.journey["prefill_ms"] for each in asked) / 1e3
    size = statistics.median(each.journey["bytes_raw"] for each in asked)
    gbps = size * 8 / prefill / 1e9
    found = []
    for more in ((), ("--disaggregation-disable-overlap",)):
        with Pair.start(model, (*FLAGS, "--disaggregation-link-gbps", f"{gbps:.6f}", *more)) as pair:
            found.append(_overlap(_ask(pair, numbers, tokens, repeats), gbps))
    return found[0], found[1]


def _ask(pair: Pair, numbers: random.Random, tokens: int, repeats: int) -> list[Asked]:
    """One more than `repeats`: the first pays for connections and compiled kernels."""
    prompts = [[numbers.choice(VOCABULARY) for _ in range(tokens)] for _ in range(repeats + 1)]
    return [pair.ask(prompt, OUTPUT) for prompt in prompts][1:]


def _overlap(asked: list[Asked], gbps: float) -> Overlap:
    steps = [later - sooner for each in asked for sooner, later in zip(each.times[1:], each.times[2:])]
    step = statistics.median(steps)
    # Until the last byte was there, and from the first token's way out to the second's.
    visible = [each.journey["visible_transfer_ms"] / 1e3 + each.times[1] - each.times[0] - step for each in asked]
    return Overlap(
        gbps=gbps,
        prefill=statistics.median(each.journey["prefill_ms"] for each in asked) / 1e3,
        transfer=statistics.median(each.journey["bytes_raw"] for each in asked) * 8 / (gbps * 1e9),
        step=step,
        visible=statistics.median(visible),
    )


def _say(name: str, found: Overlap) -> None:
    print(
        f"  {name:16} prefill {found.prefill * 1e3:7.1f} ms, transfer {found.transfer * 1e3:7.1f} ms at {found.gbps:.3f} Gbps, "
        f"decode step {found.step * 1e3:5.1f} ms, visible transfer {found.visible * 1e3:7.1f} ms = {found.share:.1%} of the transfer"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures; the exit code."""
    parser = argparse.ArgumentParser(prog="bench_pd", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="demo", help="of the servers (overlap)")
    parser.add_argument("--tokens", type=int, default=2048, help="of each prompt")
    parser.add_argument("--repeats", type=int, default=5, help="prompts of which the median is taken")
    parser.add_argument("--part", choices=("wire", "overlap", "all"), default="all")
    asked = parser.parse_args(argv)
    if asked.tokens < 64 or asked.repeats < 1:
        parser.error("--tokens is 64 or more, --repeats 1 or more")
    print(
        f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores; a prompt of {asked.tokens} tokens", flush=True
    )
    try:
        if asked.part != "overlap":
            print("\nwire", *wire_rows(asked.tokens, asked.repeats), sep="\n", flush=True)
        if asked.part != "wire":
            print(f"\noverlap ({asked.model_path}, tcp)", flush=True)
            for name, found in zip(("with overlap", "without overlap"), measure_overlap(asked.model_path, asked.tokens, asked.repeats)):
                _say(name, found)
    except ConfigError as error:
        print(f"bench_pd: error: {error}", file=sys.stderr)
        return 2
    except RadixpdError as error:
        print(f"bench_pd: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
