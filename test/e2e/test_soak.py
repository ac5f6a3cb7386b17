"""Minutes at 80 % of capacity, with aborts and bad requests: right answers, flat memory, no page lost.

Three minutes in `make test-full`; `RADIXPD_SOAK_MINUTES=30` makes it the long run whose figures are in docs/log.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.servers import Server
from e2e.soak import Soak

MINUTES = float(os.environ.get("RADIXPD_SOAK_MINUTES", "3"))
WARM_UP = 60 * MINUTES / 5
GROWTH = 0.05
# The runner keeps a kernel for each number of rows that it has met; a short run is over before it has met them all.
WATCHED = ("supervisor", "api", "scheduler", "runner") if MINUTES >= 10 else ("supervisor", "api", "scheduler")
MEBIBYTE = 2**20


@pytest.mark.full
@pytest.mark.timeout(int(60 * MINUTES) + 300)
def test_soak(serve: Callable[..., Server], tiny: Path) -> None:
    server = serve("--max-total-tokens", "16384", "--log-level", "warning")
    soak = Soak(server)
    report = soak.run(seconds=60 * MINUTES, measure=20, share=0.8)
    growth = report.flatness(WARM_UP)
    offered = f"offered {report.rate:.1f} for {MINUTES:g} min; client late by {report.late:.2f} s at most"
    print(f"\ncapacity {report.capacity:.1f} requests/s, {offered}")
    print(f"answers: {dict(report.counts)}, wrong: {len(report.wrong)}")
    for name, samples in report.rss.items():
        first, last = (samples[at][1] / MEBIBYTE for at in (0, -1))
        print(f"{name}: {first:.1f} MiB at first, {last:.1f} at last, {100 * growth[name]:+.2f} % after warm-up")
    assert report.wrong == []
    assert report.counts["whole"] > 100
    assert report.counts["aborted"] > 0
    assert report.counts["refused"] > 0
    server.settled()
    server.flush()
    assert server.pages() == {"free": 16384 / 16, "tree": 0, "request": 0, "quarantine": 0}
    assert {name: growth[name] for name in WATCHED if abs(growth[name]) > GROWTH} == {}
