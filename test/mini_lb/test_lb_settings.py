"""Flags of the load balancer: what they mean, and one line for what they cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from radixpd.errors import ConfigError
from radixpd.mini_lb.settings import WorkerSpec, parse, workers


def test_workers_from_flags() -> None:
    fleet = parse(["--worker-urls", "http://a:1/", "http://[::1]:2", "https://c"]).fleet
    assert workers(fleet) == [WorkerSpec("http://a:1"), WorkerSpec("http://[::1]:2"), WorkerSpec("https://c")]


def test_a_bootstrap_port_belongs_to_the_url_before_it() -> None:
    fleet = parse(["--prefill", "http://a", "7001", "--prefill", "http://b", "--decode", "http://c", "--decode", "http://d"]).fleet
    assert workers(fleet) == [
        WorkerSpec("http://a", "prefill", 7001),
        WorkerSpec("http://b", "prefill", 8998),
        WorkerSpec("http://c", "decode"),
        WorkerSpec("http://d", "decode"),
    ]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--worker-urls", "a:1"], "--worker-urls a:1: give http://HOST:PORT"),
        (["--worker-urls", "http://a/v1"], "without a path"),
        (["--worker-urls", "http://a:65536"], "the port must be between 1 and 65535"),
        (["--worker-urls", "http://a:0"], "the port must be between 1 and 65535"),
        (["--worker-urls", f"http://{'a' * 64}:1"], "between 1 and 63 characters"),
        (["--worker-urls", "http://a..b:1"], "between 1 and 63 characters"),
        (["--worker-urls", "http://a", "http://a/"], "named twice: http://a"),
        (["--prefill", "7001", "--decode", "http://c"], "--prefill 7001"),
        (["--prefill", "http://a", "70000", "--decode", "http://c"], "from 1 to 65535"),
        (["--prefill", "http://a"], "go together"),
        (["--decode", "http://a"], "go together"),
        (["--worker-urls", "http://a", "--prefill", "http://b", "--decode", "http://c"], "do not go together"),
        (["--policy", "fastest"], "--policy fastest: choose from"),
        (["--queue-size", "-1"], "--queue-size -1: it must be an integer from 0"),
        (["--worker-url", "http://a"], "the nearest is --worker-urls"),
        (["--api-key", "a b"], "--api-key: a key holds a space"),
        (["--forward-api-key"], "--forward-api-key needs --api-key"),
        (["--retry-status-codes", "404"], "from 500 to 599"),
    ],
)
def test_what_cannot_be_is_one_line(flags, words) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(flags)
    assert words in str(caught.value)


def test_a_file_holds_the_same_flags(tmp_path: Path) -> None:
    file = tmp_path / "lb.yaml"
    file.write_text(json.dumps({"prefill": ["http://a", 7001], "decode": ["http://b"], "api-key": ["k"], "port": 0}))
    settings = parse(["--config", str(file), "--port", "5"])
    assert workers(settings.fleet)[0] == WorkerSpec("http://a", "prefill", 7001)
    assert settings.door.port == 5


def test_secrets_are_not_shown() -> None:
    assert "s3cret" not in repr(parse(["--api-key", "s3cret", "--worker-api-key", "s3cret2", "--admin-api-key", "s3cret3"]))
