"""Who a server says it is to the other half of a pair."""

from __future__ import annotations

from dataclasses import replace

import pytest
from config.test_resolve import SETTINGS, decide

from radixpd.config.settings import DisaggregationSettings
from radixpd.runtime.disaggregation import identity_of, reachable_host
from radixpd.runtime.messages import RunnerReady

LAYOUT = {"layers": 1, "kv_heads": 1, "head_dim": 8, "page_size": 16, "dtype": "float32", "order": "NHD", "fingerprint": "f"}


@pytest.mark.parametrize(
    ("host", "advertise", "told"),
    [
        ("127.0.0.1", None, "127.0.0.1"), ("node-1", None, "node-1"), ("::1", None, "[::1]"), ("[fd00::1]", None, "[fd00::1]"),
        ("::1", "fd00::2", "[fd00::2]"), ("0.0.0.0", "10.0.0.1", "10.0.0.1"), ("::1", "node-2", "node-2"),
    ],
)  # fmt: skip
def test_an_address_can_have_a_port_behind_it(host: str, advertise: str | None, told: str) -> None:
    disaggregation = DisaggregationSettings(disaggregation_mode="prefill", disaggregation_advertise_host=advertise)
    settings = replace(SETTINGS, server=replace(SETTINGS.server, host=host, port=81), disaggregation=disaggregation)
    resolved = decide(settings)
    assert reachable_host(resolved) == told
    ready = RunnerReady(resolved.pages, resolved.page_size, "m", 0.0, layout=LAYOUT)
    assert identity_of("prefill", resolved, ready).name == f"{told}:81"
