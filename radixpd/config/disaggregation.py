"""What must hold between the settings of a prefill or decode server.

Pure. Invariant: whatever passes means something: no flag of a pair without a pair, and every name is written as it is compared later
(`--disaggregation-peers` with the host that a request names). Called by `config.resolve`.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from dataclasses import replace

from radixpd.config.settings import DisaggregationSettings
from radixpd.errors import ConfigError

__all__ = ["TRANSFER_DTYPES", "check_disaggregation", "complete", "disaggregation_notes", "transfer_dtypes"]

MODE = "disaggregation_mode"
TRANSFER_DTYPES = ("none", "fp8_e4m3", "int8", "int4")
AUTO = "auto:"
NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,251}[a-z0-9])?")
WILDCARDS = ("0.0.0.0", "::", "*")
DEVICES = re.compile(r"[\w.:-]+(,[\w.:-]+)*", re.ASCII)
# By role: the flags that only the other role obeys. A server may change its role while it runs.
IDLE = {
    "prefill": (
        "disaggregation_peers", "disaggregation_local_prefill_tokens", "disaggregation_fallback", "disaggregation_reserve_timeout",
        "disaggregation_transfer_timeout",
    ),
    "decode": ("disaggregation_bootstrap_port", "disaggregation_bootstrap_timeout", "disaggregation_disable_overlap"),
}  # fmt: skip


def check_disaggregation(settings: DisaggregationSettings) -> None:
    """Raise `ConfigError` for values that no pair of servers can use, or that contradict each other."""
    given = _given(settings)
    if given and MODE not in given:
        raise ConfigError(f"{_flag(given[0])} needs --disaggregation-mode prefill or decode: this server has no other half")
    _check_dtype(settings.disaggregation_transfer_dtype)
    for peer in settings.disaggregation_peers:
        _check_peer(peer)
    if (host := settings.disaggregation_advertise_host) is not None and (host in WILDCARDS or not _is_host(host)):
        raise ConfigError(f"--disaggregation-advertise-host {host}: give a host name or an address that other servers can reach")
    device, backend = settings.disaggregation_ib_device, settings.disaggregation_transfer_backend
    if device is not None and backend != "mooncake":
        raise ConfigError(f"--disaggregation-ib-device is for --disaggregation-transfer-backend mooncake, not {backend}")
    if device is not None and not DEVICES.fullmatch(device):
        raise ConfigError(f"--disaggregation-ib-device {device}: give the names of RDMA devices, as mlx5_0,mlx5_1")


def complete(settings: DisaggregationSettings, *, page_size: int) -> DisaggregationSettings:
    """With what was left open; a server without a pair keeps it so."""
    if settings.disaggregation_local_prefill_tokens is not None or MODE not in _given(settings):
        return settings
    return replace(settings, disaggregation_local_prefill_tokens=page_size)


def disaggregation_notes(settings: DisaggregationSettings) -> tuple[str, ...]:
    """What an operator may not have meant, as lines for the log."""
    role = settings.disaggregation_mode
    idle = [_flag(name) for name in _given(settings) if name in IDLE.get(role, ())]
    return (f"{', '.join(idle)}: no effect on a {role} server until its role is switched",) if idle else ()


def transfer_dtypes(value: str) -> tuple[str, ...]:
    """The names in a value of `--disaggregation-transfer-dtype`, in its order."""
    return tuple(name.strip() for name in value.removeprefix(AUTO).split(",")) if value.startswith(AUTO) else (value,)


def _given(settings: DisaggregationSettings) -> list[str]:
    """Fields that differ from their defaults."""
    return [field.name for field in dataclasses.fields(settings) if getattr(settings, field.name) != field.default]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_dtype(value: str) -> None:
    names = transfer_dtypes(value)
    for name in names:
        if name not in TRANSFER_DTYPES:
            raise ConfigError(
                f"--disaggregation-transfer-dtype {value}: {name or 'an empty name'} is none of {', '.join(TRANSFER_DTYPES)}; "
                "several to pick from are written auto:int8,int4"
            )
    if len({*names}) < len(names):
        raise ConfigError(f"--disaggregation-transfer-dtype {value}: a name stands twice")


def _check_peer(entry: str) -> None:
    host, port = entry, ""
    if not _is_address6(entry) and ":" in entry.rpartition("]")[2]:
        host, _, port = entry.rpartition(":")
        if not (re.fullmatch(r"[1-9][0-9]{0,4}", port, re.ASCII) and int(port) <= 65_535):
            raise ConfigError(f"--disaggregation-peers {entry}: the port must be an integer from 1 to 65535")
        if _is_address6(host):
            raise ConfigError(f"--disaggregation-peers {entry}: an IPv6 address with a port is written [{host}]:{port}")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1] if _is_address6(host[1:-1]) else ""
    if not _is_host(host):
        raise ConfigError(f"--disaggregation-peers {entry}: give host or host:port, a name or an IP address")
    if _is_address6(host) and host.lower() != (short := str(ipaddress.IPv6Address(host))):
        raise ConfigError(f"--disaggregation-peers {entry}: write this address as {short}")


def _is_host(text: str) -> bool:
    return _is_address6(text) or NAME.fullmatch(text.lower()) is not None


def _is_address6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
