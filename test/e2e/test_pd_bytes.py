"""Bytes between prefill and decode: exactly those of the prompt tokens that decode lacks, and none where it lacks next to nothing.

What is expected is worked out from the model's shape, by hand. Two count: the journey of each request (and with it the metrics), and, on
tcp, a proxy between the two servers that sees every byte that crosses.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import psutil
import pytest
from e2e.asks import GREEDY
from e2e.pd import Pair
from e2e.pd_prompts import ids
from e2e.test_pd import ALWAYS, TRANSPORTS
from kv.moving import need

LOCAL = 24  # tokens that decode would rather compute itself
ANSWER = 12
OVERHEAD = 0.02  # of a transfer on tcp: heads and answers of frames
ROWS = [("shm", 1), ("tcp", 16), ("mooncake", 16), ("nixl", 1)]
OTHER_LOOPBACK = "127.0.0.2"


@pytest.fixture(scope="module")
def token_bytes(tiny: Path) -> int:
    """KV of one token: keys and values of all layers, in float32."""
    config = json.loads((tiny / "config.json").read_text())
    head = config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * 4)


class Ledger:
    """Asks a pair and adds up what its answers say has crossed."""

    def __init__(self, pair: Pair, page: int, token_bytes: int) -> None:
        self.pair = pair
        self.page = page
        self.token_bytes = token_bytes
        self.total = 0

    def ask(self, prompt: list[int], *, has: int) -> list[int]:
        """The answer to a prompt of which decode has the KV of the first `has` tokens; what crosses must be the rest."""
        found = self.pair.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": ANSWER})
        journey = found["meta_info"]["kv_journey"]
        # Whole pages are shared, and the last token of a prompt is always computed.
        hit = min(has, len(prompt) - 1) // self.page * self.page
        missing = len(prompt) - hit
        pages = -(-missing // self.page) if missing > LOCAL else 0
        if self.page == 1:
            assert pages == (missing if missing > LOCAL else 0)
        expected = pages * self.page * self.token_bytes
        assert journey["decode_hit_tokens"] == hit
        assert (journey["pages_sent"], journey["bytes_raw"], journey["bytes_wire"]) == (pages, expected, expected), journey
        assert journey["fallback"] == ""
        assert journey["local_computed_tokens"] == (0 if pages else missing)
        self.total += expected
        output: list[int] = found["output_ids"]
        return output


@pytest.mark.parametrize(
    ("transport", "page"), [*ROWS, *(pytest.param(*row, marks=pytest.mark.full) for row in product(TRANSPORTS, (1, 16)) if row not in ROWS)]
)
def test_only_what_decode_lacks_crosses(pair: Callable[..., Pair], token_bytes: int, transport: str, page: int) -> None:
    if transport not in ALWAYS:
        need(transport)
    flags = ("--page-size", str(page), "--disaggregation-transfer-backend", transport)
    both = pair(*flags, "--chunked-prefill-size", "64", "--disaggregation-local-prefill-tokens", str(LOCAL))
    both.flush()
    before = both.decode.metric("kv_transfer_bytes"), both.prefill.metric("kv_transfer_pages")
    ledger = Ledger(both, page, token_bytes)

    said = ids(1, 200)
    for turn in range(4):
        # Each turn is what was said, its answer, and 60 tokens more. Of an answer, the last token's KV is never needed and never made.
        has = len(said) - 60 - 1 if turn else 0
        said = said + ledger.ask(said, has=has) + ids(10 + turn, 60)
    fresh = ids(20, 300)
    ledger.ask(fresh, has=0)
    ledger.ask(fresh, has=300)  # once more: nothing moves
    ledger.ask(fresh[:250] + ids(21, 100), has=250)
    for rest in (LOCAL, LOCAL + 1):
        ledger.ask(fresh[:288] + ids(22 + rest, rest), has=288)
    ledger.ask(ids(30, LOCAL), has=0)
    ledger.ask(ids(31, LOCAL + 1), has=0)

    assert ledger.total > 0
    raw_and_wire = both.decode.metric("kv_transfer_bytes") - before[0]
    assert raw_and_wire == 2 * ledger.total
    assert (both.prefill.metric("kv_transfer_pages") - before[1]) * page * token_bytes == ledger.total
    both.settled()


class Proxy:
    """Listens at the other end of loopback and passes everything on to the same port of this one. `crossed`: bytes towards that port."""

    def __init__(self, port: int) -> None:
        self.crossed = 0
        self._port = port
        self._lock = threading.Lock()
        self._listener = socket.create_server((OTHER_LOOPBACK, port))
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                for pair, counted in (((near, far), True), ((far, near), False)):
                    threading.Thread(target=self._pass, args=(*pair, counted), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if counted:
                    with self._lock:
                        self.crossed += len(data)
                target.sendall(data)
        for each in (source, target):
            each.close()


@pytest.fixture
def watched(tiny: Path) -> Iterator[tuple[Pair, Proxy]]:
    """A pair on tcp, and who sees its bytes."""
    backend = ("--disaggregation-transfer-backend", "tcp", "--max-total-tokens", "4096")
    both = Pair.start(tiny, *backend, decode=("--disaggregation-advertise-host", OTHER_LOOPBACK))
    (port,) = [
        each.laddr.port
        for each in psutil.Process(both.decode.children()["runner"]).net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    ]
    proxy = Proxy(port)
    yield both, proxy
    assert both.close() == 0
    proxy.close()


def test_a_witness_on_the_wire_counts_the_same(watched: tuple[Pair, Proxy], token_bytes: int) -> None:
    both, proxy = watched

    def crossed(prompt: list[int]) -> int:
        before = proxy.crossed
        found = both.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": ANSWER})
        assert found["meta_info"]["kv_journey"]["fallback"] == ""
        return proxy.crossed - before

    assert proxy.crossed == 0
    crossed(ids(40, 40))  # greetings of the connections
    for prompt, tokens in ((ids(41, 1600), 1600), (ids(41, 1600), 0), (ids(41, 1600) + ids(42, 800), 800)):
        expected = tokens * token_bytes
        assert expected <= crossed(prompt) <= expected * (1 + OVERHEAD)
    both.settled()
