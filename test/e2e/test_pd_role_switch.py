"""Two servers trade their roles: requests work before and after, and what was cached still is."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.pd import Pair
from e2e.servers import Server, free_port

BODY = {"sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}


@pytest.fixture
def traded(tiny: Path) -> Pair:
    """A pair whose decode server has a port for the day on which it is a prefill server."""
    port = free_port()
    return Pair.start(tiny, "--max-total-tokens", "4096", decode=("--disaggregation-bootstrap-port", str(port)))


def test_a_pair_trades_roles_and_keeps_its_caches(traded: Pair, server: Server) -> None:
    text = "what both have seen " * 12
    alone = server.generate(text=text, **BODY)
    assert traded.generate(text=text, **BODY)["output_ids"] == alone["output_ids"]
    for server_of_pair, role in ((traded.prefill, "decode"), (traded.decode, "prefill")):
        assert server_of_pair.post("/pd_role_switch", {"role": role}).json["role"] == role
    port = traded.decode.get("/server_info").json["disaggregation_bootstrap_port"]
    back = Pair(traded.decode, traded.prefill, port)
    again = back.generate(text=text, **BODY)
    assert again["output_ids"] == alone["output_ids"]
    assert again["meta_info"]["cached_tokens"] >= again["meta_info"]["prompt_tokens"] - 16
    fresh = f"what nobody has seen {secrets.token_hex(8)} " * 8
    assert back.generate(text=fresh, **BODY)["output_ids"] == server.generate(text=fresh, **BODY)["output_ids"]
    assert traded.close() == 0


def test_a_switch_that_cannot_be_made_changes_nothing(traded: Pair, serve: Callable[..., Server]) -> None:
    """The decode server's future port is taken."""
    port = traded.decode.get("/server_info").json["disaggregation_bootstrap_port"]
    other = Pair.start(
        traded.decode.get("/server_info").json["model_path"],
        "--max-total-tokens",
        "1024",
        prefill=("--disaggregation-bootstrap-port", str(port)),
    )
    refused = traded.decode.post("/pd_role_switch", {"role": "prefill"})
    assert refused.status == 400
    assert "--disaggregation-bootstrap-port" in refused.json["error"]["message"]
    assert traded.generate(text="still a decode server " * 5, **BODY)["meta_info"]["completion_tokens"] == 8
    assert other.close() == 0
    assert traded.close() == 0
