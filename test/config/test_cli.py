"""Command line and YAML file: what is understood, what is refused, and in which words."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from radixpd.config.cli import parse
from radixpd.config.known_flags import ALIASES, REFUSED, REFUSED_PREFIXES, VALUE_REASONS, refusal
from radixpd.config.settings import Settings
from radixpd.errors import ConfigError

DEMO = ["--model-path", "demo"]
FIELDS = {
    field.name.replace("_", "-"): field
    for group in dataclasses.fields(Settings)
    for field in dataclasses.fields(getattr(Settings(), group.name))
}

# The flags of reference notes that SGLang's users type most; each is either ours or refused in one sentence.
COMMON = """
model-path tokenizer-path tokenizer-mode skip-tokenizer-init load-format trust-remote-code context-length is-embedding revision host port
grpc-mode skip-server-warmup dtype quantization kv-cache-dtype mem-fraction-static max-running-requests max-queued-requests
max-total-tokens chunked-prefill-size max-prefill-tokens schedule-policy enable-priority-scheduling schedule-conservativeness page-size
radix-eviction-policy device tp-size pp-size dp-size ep-size load-balance-method stream-interval random-seed watchdog-timeout base-gpu-id
nnodes node-rank dist-init-addr log-level log-requests log-requests-level crash-dump-folder enable-metrics decode-log-interval
enable-request-time-stats-logging kv-events-config enable-trace api-key admin-api-key served-model-name chat-template enable-cache-report
reasoning-parser tool-call-parser sampling-defaults enable-lora lora-paths max-loras-per-batch attention-backend sampling-backend
grammar-backend speculative-algorithm speculative-num-steps speculative-draft-model-path enable-hierarchical-cache hicache-ratio
hicache-size hicache-write-policy hicache-io-backend hicache-mem-layout hicache-storage-backend hicache-storage-prefetch-policy
disable-radix-cache cuda-graph-max-bs disable-cuda-graph disable-overlap-schedule enable-mixed-chunk enable-dp-attention
enable-torch-compile num-continuous-decode-steps enable-deterministic-inference enable-custom-logit-processor disaggregation-mode
disaggregation-transfer-backend disaggregation-bootstrap-port disaggregation-ib-device num-reserved-decode-tokens
json-model-override-args config
"""


def fault(argv: list[str]) -> str:
    """The one line that `argv` is refused with."""
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_are_the_dataclass_defaults() -> None:
    assert parse(DEMO) == dataclasses.replace(Settings(), model=dataclasses.replace(Settings().model, model_path="demo"))


def test_every_kind_of_flag() -> None:
    typed = "--port=0 --schedule-conservativeness 0.5 --disable-radix-cache --no-enable-metrics --schedule-policy lpm"
    typed += " --chunked-prefill-size -1 --api-key one two --api-key three"
    settings = parse([*DEMO, *typed.split()])
    assert settings.server.port == 0
    assert settings.scheduler.schedule_conservativeness == 0.5
    assert settings.cache.disable_radix_cache
    assert not settings.observe.enable_metrics
    assert settings.scheduler.schedule_policy == "lpm"
    assert settings.scheduler.chunked_prefill_size == -1
    assert [key.reveal() for key in settings.server.api_key] == ["one", "two", "three"]


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_aliases(alias: str) -> None:
    target = FIELDS[ALIASES[alias]].name
    settings = parse([*DEMO, f"--{alias}", "1"])
    assert str(getattr(settings.model if target == "model_path" else settings.engine, target)) == "1"


@pytest.mark.parametrize("name", COMMON.split())
def test_no_common_flag_is_unknown(name: str) -> None:
    assert name == "config" or (name in FIELDS) != (refusal(name) is not None)


def test_what_we_have_is_not_refused() -> None:
    assert not {name for name in FIELDS if refusal(name)}
    assert set(VALUE_REASONS) <= set(FIELDS)
    assert set(ALIASES.values()) <= set(FIELDS)


@pytest.mark.parametrize("name", [*REFUSED, *(f"{prefix}x" for prefix in REFUSED_PREFIXES)])
def test_a_refusal_names_the_flag_and_a_reason(name: str) -> None:
    for argv in ([*DEMO, f"--{name}", "1"], [*DEMO, f"--{name}=1"]):
        message = fault(argv)
        assert message.startswith(f"--{name}: radixpd")
        assert message.count(". ") == 0


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("prot", "port"),
        ("model-pth", "model-path"),
        ("max_total_tokens", "max-total-tokens"),
        ("disagregation-mod", "disaggregation-mode"),
        ("enable-lorra", "enable-lora"),
    ],
)
def test_an_unknown_flag_names_its_nearest(typed: str, nearest: str) -> None:
    assert fault([*DEMO, f"--{typed}", "1"]) == f"unknown flag --{typed}; the nearest is --{nearest}"


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.metadata["low"] is not None])
def test_ranges_are_closed_and_named(name: str) -> None:
    low, high = FIELDS[name].metadata["low"], FIELDS[name].metadata["high"]
    for inside in {low, high}:
        parse([*DEMO, f"--{name}", str(inside)])
    for outside in (low - 1, high + 1, "nan", "inf", "many", ""):
        message = fault([*DEMO, f"--{name}={outside}"])
        assert message.startswith(f"--{name} {outside}: it must be ")
        assert str(low) in message
        assert str(high) in message


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.metadata["choices"]])
def test_choices_are_named(name: str) -> None:
    message = fault([*DEMO, f"--{name}", "fp8_or_fa3"])
    assert message.startswith(f"--{name} fp8_or_fa3: ")
    assert all(choice in message for choice in FIELDS[name].metadata["choices"])


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "--model-path is missing"),
        (["--model-path", ""], "--model-path is missing"),
        ([*DEMO, "--port"], "--port"),
        ([*DEMO, "stray"], "stray"),
        ([*DEMO, "--page-size", "1.5"], "--page-size 1.5: it must be an integer"),
        ([*DEMO, "--tp-size", "2"], "one model runner"),
        ([*DEMO, "--kv-cache-dtype", "fp8_e5m2"], "the model's precision"),
        ([*DEMO, "--enable-metrics=true"], "--enable-metrics"),
        ([*DEMO, "--api-key", ""], "--api-key"),
    ],
)
def test_faults(argv: list[str], part: str) -> None:
    assert part in fault(argv)


def write(directory: Path, text: str) -> list[str]:
    path = directory / "server.yaml"
    path.write_text(text)
    return ["--config", str(path)]


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    config = write(tmp_path, "model-path: demo\nport: 1\npage_size: 4\nenable-metrics: false\napi-key: [a, b]\n")
    settings = parse([*config, "--port", "2", "--enable-metrics"])
    assert settings.model.model_path == "demo"
    assert (settings.server.port, settings.cache.page_size) == (2, 4)
    assert settings.observe.enable_metrics
    assert len(settings.server.api_key) == 2


def test_a_file_may_nest_json_and_leave_keys_empty(tmp_path: Path) -> None:
    settings = parse(write(tmp_path, "model: demo\nport:\nkv-events-config: {publisher: zmq, topic: kv}\n"))
    assert settings.cache.kv_events_config == '{"publisher": "zmq", "topic": "kv"}'
    assert settings.server.port == Settings().server.port


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("prot: 1", "unknown key prot; the nearest is port"),
        ("enable-lora: true", "enable-lora: radixpd does not serve LoRA"),
        ("tp_size: 2", "--tp-size 2: it must be 1"),
        ("port: 70000", "--port 70000: it must be an integer from 0 to 65535"),
        ("port: true", "--port True: it must be an integer"),
        ("page-size: 16.0", "--page-size 16.0: it must be an integer"),
        ("enable-metrics: 1", "--enable-metrics 1: give true or false"),
        ("host: [a]", "--host ['a']: give text"),
        ("page-size: 1\npage_size: 2", "given twice"),
        ("- a\n- b", "one flag a line"),
        ("a: [", "line 1: expected the node content"),
        ("config: other.yaml", "config: a configuration file cannot name another one"),
        ("port: 1\npage-size: 4\nport: 2", "port is given twice"),
        ("'port': 1\nport: 2", "port is given twice"),
        ("kv-events-config: {publisher: zmq, topic: a, topic: b}", "topic is given twice"),
        ("api-key: &a [*a]\nhost: 2024-99-99", "--config"),
        ("host: " + "[" * 5000, "--config"),
        ("api-key: [true]", "--api-key: a value"),
    ],
)
def test_faults_in_a_file(tmp_path: Path, text: str, part: str) -> None:
    assert part in fault([*DEMO, *write(tmp_path, text)])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    assert fault(["--config", str(path)]) == f"--config {path}: No such file or directory"
    assert fault(["--config", str(tmp_path)]) == f"--config {tmp_path}: Is a directory"


@given(
    port=st.integers(0, 65535),
    share=st.none() | st.floats(0.01, 0.95),
    policy=st.sampled_from(["fcfs", "lpm", "dfs-weight", "random", "priority"]),
    mixed=st.booleans(),
    name=st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=10),
)
def test_flags_and_file_mean_the_same(
    tmp_path_factory: pytest.TempPathFactory, port: int, share: float | None, policy: str, mixed: bool, name: str
) -> None:
    values = {"port": port, "mem-fraction-static": share, "schedule-policy": policy, "enable-mixed-chunk": mixed, "served-model-name": name}
    path = tmp_path_factory.mktemp("yaml") / "c.yaml"
    path.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
    argv = [f"--{key}={value}" for key, value in values.items() if value is not None and not isinstance(value, bool)]
    argv.append("--enable-mixed-chunk" if mixed else "--no-enable-mixed-chunk")
    assert parse([*DEMO, *argv]) == parse([*DEMO, "--config", str(path)])


def test_a_secret_shows_in_no_message(tmp_path: Path) -> None:
    assert "hush" not in fault(write(tmp_path, "port: 1\napi-key: hush: 2\n"))
    settings = parse([*DEMO, "--api-key", "hush"])
    assert "hush" not in f"{settings} {settings!r}"
    assert "hush" not in fault([*DEMO, "--api-key", "hush", "--api-key", ""])


def test_help_is_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert all(f"\n{group.name}:\n" in text for group in dataclasses.fields(Settings))
    assert all(f"--{name}" in text for name in FIELDS)
