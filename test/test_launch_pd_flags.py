"""What launch_pd makes of its command line, without starting anything."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from radixpd import launch_pd
from radixpd.config import cli
from radixpd.errors import ConfigError
from radixpd.launch_pd import Shares, balancer_file, parse, server_flags
from radixpd.mini_lb.settings import parse as parse_lb
from radixpd.mini_lb.settings import workers

ROOT = Path(__file__).parents[1]
MODEL = ("--model-path", "m")
SHARES = Shares(pool_tokens=1600, threads=2, seed=77)


def settings_of(group, role="prefill", **ports):
    flags = server_flags(group, role, **{"port": 4001, "bootstrap_port": 4002, **ports}, shares=SHARES, events="/private/p0")
    return cli.parse(flags)


def test_each_server_has_its_role_and_ports() -> None:
    group = parse([*MODEL, "--prefill", "2", "--decode", "3", "--port", "31000", "--host", "0.0.0.0", "--page-size", "32"])
    assert (group.prefill, group.decode, group.servers) == (2, 3, 5)
    for role in ("prefill", "decode"):
        settings = settings_of(group, role)
        assert (settings.server.host, settings.server.port) == ("127.0.0.1", 4001)
        assert settings.disaggregation.disaggregation_mode == role
        assert settings.disaggregation.disaggregation_bootstrap_port == 4002
        assert settings.cache.page_size == 32
    assert settings_of(group, "decode").disaggregation.disaggregation_peers == ("127.0.0.1",)


def test_what_no_flag_sets_is_divided() -> None:
    settings = settings_of(parse(MODEL))
    assert (settings.cache.max_total_tokens, settings.engine.threads, settings.engine.random_seed) == (1600, 2, 77)


def test_servers_tell_the_balancer_what_they_have_cached() -> None:
    told = json.loads(settings_of(parse(MODEL)).cache.kv_events_config or "")
    assert told == {"publisher": "zmq", "endpoint": "ipc:///private/p0-events", "replay_endpoint": "ipc:///private/p0-replay"}
    own = '{"publisher": "null"}'
    assert settings_of(parse([*MODEL, "--kv-events-config", own])).cache.kv_events_config == own
    assert settings_of(parse([*MODEL, "--disable-radix-cache"])).cache.kv_events_config is None


def test_flags_win_over_shares() -> None:
    group = parse(
        [*MODEL, "--threads", "3", "--prefill-args", "--max-total-tokens 320 --threads=5", "--decode-args", "--mem-fraction-static 0.1"]
    )
    prefill, decode = settings_of(group, "prefill"), settings_of(group, "decode")
    assert (prefill.cache.max_total_tokens, prefill.engine.threads) == (320, 5)
    assert (decode.cache.max_total_tokens, decode.cache.mem_fraction_static, decode.engine.threads) == (None, 0.1, 3)


def test_the_load_balancer_reads_its_file(tmp_path: Path) -> None:
    flags = ["--api-key", "k1", "k2", "--admin-api-key", "adm", "--salt-from-key", "--port", "31000", "--request-timeout", "9"]
    group = parse([*MODEL, *flags])
    file = launch_pd._write_private(tmp_path / "lb.json", balancer_file(group, [(4001, 4002), (4003, 4004)], [4005]))
    assert file.stat().st_mode & 0o777 == 0o600
    settings = parse_lb(["--config", str(file), "--policy", "random"])
    assert [(spec.url, spec.role, spec.bootstrap_port) for spec in workers(settings.fleet)] == [
        ("http://127.0.0.1:4001", "prefill", 4002),
        ("http://127.0.0.1:4003", "prefill", 4004),
        ("http://127.0.0.1:4005", "decode", 8998),
    ]
    assert [key.reveal() for key in settings.door.api_key] == ["k1", "k2"]
    assert settings.fleet.worker_api_key is not None
    assert settings.fleet.worker_api_key.reveal() == "adm"
    assert settings.fleet.forward_api_key
    assert (settings.door.port, settings.door.request_timeout, settings.fleet.policy) == (31000, 9, "random")


def test_without_keys_there_are_none(tmp_path: Path) -> None:
    file = launch_pd._write_private(tmp_path / "lb.json", balancer_file(parse(MODEL), [(1, 2)], [3]))
    settings = parse_lb(["--config", str(file)])
    assert (settings.door.api_key, settings.fleet.worker_api_key, settings.fleet.forward_api_key) == ((), None, False)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--model-path is missing"),
        ([*MODEL, "--prefill", "0"], "--prefill 0: it must be an integer from 1 to 64"),
        ([*MODEL, "--decode", "many"], "--decode many"),
        ([*MODEL, "--prot", "1"], "unknown flag --prot"),
        ([*MODEL, "--disaggregation-mode", "decode"], "--disaggregation-mode is chosen by launch_pd"),
        ([*MODEL, "--disaggregation-bootstrap-port=5"], "--disaggregation-bootstrap-port is chosen by launch_pd"),
        ([*MODEL, "--prefill-args", "--port 5"], "--prefill-args: --port is chosen by launch_pd"),
        ([*MODEL, "--decode-args", "--host 0.0.0.0"], "--decode-args: --host is chosen by launch_pd"),
        ([*MODEL, "--decode-args", "--page-size huge"], "--page-size huge"),
        ([*MODEL, "--decode-args", "'"], "--decode-args: No closing quotation"),
        ([*MODEL, "--port", "0"], "--port 0"),
        ([*MODEL, "--lb-args", "--policy fastest"], "--policy fastest"),
        ([*MODEL, "--lb-args", "--worker-urls http://x"], "--lb-args: --worker-urls is chosen"),
    ],
)
def test_a_fault_is_one_line_before_anything_starts(flags, words) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(flags)
    assert words in str(caught.value)


def test_help_is_light() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "radixpd.launch_pd", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60, check=False)
    assert done.returncode == 0
    assert "--prefill-args" in done.stdout
    assert not [name for name in ("torch", "transformers", "aiohttp", "zmq") if f"| {name}\n" in done.stderr.replace("|   ", "| ")]


def test_a_port_that_is_held_lets_the_server_in_and_nobody_else() -> None:
    with ExitStack() as held:
        ports = list(launch_pd._free_ports(3, held))
        assert len(set(ports)) == 3
        for port in ports:
            with socket.socket() as stranger, pytest.raises(OSError):
                stranger.bind(("127.0.0.1", port))
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("127.0.0.1", port))
                server.listen()
                with socket.create_connection(("127.0.0.1", port), timeout=5):
                    pass


def test_the_secret_is_drawn_once_and_only_if_there_is_none(monkeypatch) -> None:
    settings = parse(MODEL).settings
    monkeypatch.delenv("SECRET", raising=False)
    one, two = (launch_pd._environment(settings, "SECRET")["SECRET"] for _ in range(2))
    assert one != two
    assert len(one) == 64
    assert "SECRET" not in os.environ
    monkeypatch.setenv("SECRET", "given")
    assert launch_pd._environment(settings, "SECRET")["SECRET"] == "given"
