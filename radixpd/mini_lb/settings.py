"""The load balancer's settings: a frozen dataclass per subject, each field with its flag's help and range (`config.cli` reads them).

Invariant: what `parse` returns can work: workers have http(s) URLs and are named once, policies exist, keys can be sent. Called by
`__main__`; `launch_pd` writes a file for `--config`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from radixpd.config.access import check_access
from radixpd.config.cli import parse_as
from radixpd.config.secret import Secret
from radixpd.config.settings import ServerSettings, flag
from radixpd.errors import ConfigError
from radixpd.mini_lb.balance import POLICIES
from radixpd.mini_lb.snapshot import Role

__all__ = [
    "DoorSettings",
    "FleetSettings",
    "LbSettings",
    "ObserveSettings",
    "RetrySettings",
    "WorkerSpec",
    "access",
    "check_fleet",
    "check_url",
    "named",
    "parse",
    "read",
    "workers",
]

URL = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
LONGEST_LABEL = 63  # characters between two dots of a host's name
BOOTSTRAP_PORT = 8998
HEADER_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
FAIR_WORDS = ("user", "api_key")  # of --fair-by, that name no header
CHOICES = tuple(POLICIES)


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Which workers, how they are chosen and watched."""

    worker_urls: tuple[str, ...] = flag((), "servers that answer whole requests", many=True)
    prefill: tuple[str, ...] = flag((), f"URL [BOOTSTRAP_PORT={BOOTSTRAP_PORT}] of a prefill server; may repeat", many=True, metavar="URL")
    decode: tuple[str, ...] = flag((), "URL of a decode server; may repeat", many=True, metavar="URL")
    workers_file: str | None = flag(
        None, "YAML or JSON file of worker-urls, prefill and decode, besides the flags'; read again when it changes", metavar="FILE"
    )
    policy: str = flag("kv_cost", "who gets the next request", choices=CHOICES)
    prefill_policy: str | None = flag(None, "the same for the prefill half; default: --policy", choices=CHOICES)
    decode_policy: str | None = flag(None, "the same for the decode half; default: --policy", choices=CHOICES)
    session_header: str = flag("X-Session-Id", "header by which consistent_hash keeps requests together; without it the body's `user`")
    index_memory_mb: int = flag(256, "MiB that the index of cached prefixes may take, and that of prompts sent", low=1, high=2**20)
    tokenizer_path: str | None = flag(
        None, "directory of the model's tokenizer files, where the one that the workers name is not on this machine", metavar="DIR"
    )
    worker_api_key: Secret | None = flag(  # noqa: RUF009
        None, "key for the workers: of requests, polls and orders", secret=True, metavar="KEY"
    )
    forward_api_key: bool = flag(False, "send the client's own key on, so that workers tell tenants apart (with --api-key)")
    health_check_interval_secs: float = flag(1.0, "seconds between two looks at a worker's health and load", low=0.05, high=3600)
    health_check_timeout_secs: float = flag(5.0, "seconds that such a look may take", low=0.05, high=3600)
    health_failure_threshold: int = flag(3, "failed looks in a row after which a worker is down", low=1, high=1000)
    health_success_threshold: int = flag(1, "good looks in a row after which it is up", low=1, high=1000)
    cb_failure_threshold: int = flag(5, "failed requests in a row that open a worker's circuit", low=1, high=10**6)
    cb_success_threshold: int = flag(2, "trial requests in a row that must succeed to close it", low=1, high=1000)
    cb_timeout_duration_secs: float = flag(2.0, "seconds that a circuit stays open; doubles while trials fail", low=0.01, high=3600)
    cb_max_timeout_duration_secs: float = flag(60.0, "the longest that it stays open", low=0.01, high=86400)


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """Second tries, before the first byte of an answer only."""

    retry_max_retries: int = flag(3, "further tries of one request", low=0, high=100)
    retry_initial_backoff_ms: float = flag(20.0, "wait before the second try; doubles with each", low=0, high=60_000)
    retry_max_backoff_ms: float = flag(1000.0, "the longest such wait", low=0, high=60_000)
    retry_status_codes: tuple[int, ...] = flag((502, 503), "answers of a worker that are tried elsewhere", low=500, high=599, many=True)
    retry_budget: float = flag(0.2, "tries after a request has been sent, as a share of all requests", low=0, high=100)


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """HTTP: address, keys, limits, end."""

    host: str = flag("127.0.0.1", "address to bind")
    port: int = flag(30000, "port to bind", low=0, high=65535)
    api_key: tuple[Secret, ...] = flag((), "keys that clients must send as a bearer token; may repeat", many=True, secret=True)
    admin_api_key: tuple[Secret, ...] = flag((), "keys that open every route; admin routes then need one", many=True, secret=True)
    allowed_origins: tuple[str, ...] = flag(
        (), "web origins whose pages may call the balancer, as https://app.example, or *; may repeat; default: none", many=True
    )
    max_concurrent_requests: int = flag(2048, "requests at the workers at once; more wait", low=1, high=2**20)
    queue_size: int = flag(2048, "requests that wait; more get 429", low=0, high=2**20)
    queue_timeout_secs: float = flag(60.0, "seconds that a request may wait before it gets 429", low=0.01, high=86400)
    fair_by: str | None = flag(
        None, "who waits in a line of his own, which has its turn: `user` (the body's field), `api_key`, or a header", metavar="HEADER"
    )
    slo_ttft_ms: float | None = flag(
        None, "limit of the time to first token: what would break it under load is refused; default: none", low=0.01, high=1e9
    )
    slo_tpot_ms: float | None = flag(None, "the same for the mean time per output token", low=0.01, high=1e9)
    request_timeout: float = flag(1800.0, "seconds that a request may take in all", low=0.01, high=7 * 86400)
    connect_timeout: float = flag(5.0, "seconds to reach a worker", low=0.01, high=3600)
    max_body_size: int = flag(32 * 2**20, "largest request body in bytes, after decompression", low=1024, high=2**30)
    max_header_size: int = flag(8192, "longest request line or header in bytes", low=1024, high=2**20)
    body_timeout: float = flag(60.0, "seconds in which a request's body must arrive", low=0.1, high=86400)
    drain_timeout: float = flag(60.0, "seconds that open requests get to finish after SIGTERM", low=0, high=86400)


@dataclass(frozen=True, slots=True)
class ObserveSettings:
    """Logs, and what answers say of the choice."""

    log_level: str = flag("info", "least severe message that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = flag("text", "how log lines look", choices=("text", "json"))
    request_log: str | None = flag(None, "file that gets a JSON line for each request; SIGHUP opens it anew", metavar="FILE")
    route_header: bool = flag(True, "answers tell in X-Radixpd-Route which worker was chosen (by a short name) and why")


@dataclass(frozen=True, slots=True)
class LbSettings:
    """Everything. Groups are also the groups of `--help`."""

    fleet: FleetSettings = FleetSettings()
    retry: RetrySettings = RetrySettings()
    door: DoorSettings = DoorSettings()
    observe: ObserveSettings = ObserveSettings()


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker as it is named: by a flag, or in a request to /workers. `bootstrap_port`: of a prefill server's handoffs."""

    url: str
    role: Role = "regular"
    bootstrap_port: int = BOOTSTRAP_PORT


def parse(argv: Sequence[str]) -> LbSettings:
    """`argv` without the program's name. `--help` and `--version` print and exit."""
    settings = read(argv)
    _check(settings)
    return settings


def read(argv: Sequence[str]) -> LbSettings:
    """The same for flags that are not all there yet: each is checked, not what goes together."""
    usage, about = "--worker-urls URL... [flags]", "Spread requests over radixpd servers."
    return parse_as(LbSettings, argv, program="radixpd.mini_lb", usage=usage, about=about)


def workers(fleet: FleetSettings) -> list[WorkerSpec]:
    """The workers that the flags name."""
    return named(worker_urls=fleet.worker_urls, prefill=fleet.prefill, decode=fleet.decode)


def named(*, worker_urls: Iterable[str], prefill: Iterable[str], decode: Iterable[str]) -> list[WorkerSpec]:
    """The workers that these words name, as flags or in a file."""
    found = [WorkerSpec(check_url(url, "--worker-urls")) for url in worker_urls]
    found += [WorkerSpec(check_url(url, "--prefill"), "prefill", port) for url, port in _with_ports(prefill)]
    return found + [WorkerSpec(check_url(url, "--decode"), "decode") for url in decode]


def check_fleet(found: Sequence[WorkerSpec]) -> None:
    """`ConfigError` if these cannot be one fleet."""
    if twice := {spec.url for spec in found if sum(other.url == spec.url for other in found) > 1}:
        raise ConfigError(f"a worker is named twice: {', '.join(sorted(twice))}")
    roles = {spec.role for spec in found}
    if "regular" in roles and len(roles) > 1:
        raise ConfigError("--worker-urls and --prefill/--decode do not go together: whole servers, or halves")
    if len(roles) == 1 and "regular" not in roles:
        raise ConfigError("--prefill and --decode go together: a request needs one of each")


def access(settings: LbSettings) -> ServerSettings:
    """Who may call the balancer, in the server's words. Keys that go on to the workers keep tenants apart there, and so here."""
    door = settings.door
    return ServerSettings(
        host=door.host,
        api_key=door.api_key,
        admin_api_key=door.admin_api_key,
        allowed_origins=door.allowed_origins,
        salt_from_key=settings.fleet.forward_api_key,
    )


def check_url(url: str, where: str) -> str:
    """A worker's URL without a final slash; `ConfigError` if it is none."""
    bare = url.removesuffix("/")
    found = URL.fullmatch(bare)
    if found is None:
        raise ConfigError(f"{where} {url[:200]}: give http://HOST:PORT, without a path")
    host, port = found.groups()
    if port and not 1 <= int(port[1:]) <= 65535:
        raise ConfigError(f"{where} {url[:200]}: the port must be between 1 and 65535")
    # What no resolver takes would end the task that looks at the worker.
    if any(not 1 <= len(label) <= LONGEST_LABEL for label in host.removesuffix(".").split(".")):
        raise ConfigError(f"{where} {url[:200]}: the parts of a host's name have between 1 and {LONGEST_LABEL} characters")
    return bare


def _with_ports(words: Iterable[str]) -> Iterator[tuple[str, int]]:
    """`--prefill` takes a URL and perhaps a port behind it: a word of digits belongs to the URL before it."""
    url = ""
    for word in words:
        if not word.isascii() or not word.isdigit():
            if url:
                yield url, BOOTSTRAP_PORT
            url = word
            continue
        if not url or not 1 <= int(word) <= 65535:
            raise ConfigError(f"--prefill {word}: give URL [BOOTSTRAP_PORT], the port from 1 to 65535")
        yield url, int(word)
        url = ""
    if url:
        yield url, BOOTSTRAP_PORT


def _check(settings: LbSettings) -> None:
    fleet, door = settings.fleet, settings.door
    if fleet.workers_file is None:  # else together with those of the file, by whoever reads it
        check_fleet(workers(fleet))
    if door.fair_by is not None and door.fair_by not in FAIR_WORDS and not HEADER_NAME.fullmatch(door.fair_by):
        raise ConfigError(f"--fair-by {door.fair_by[:200]}: give user, api_key or the name of a header")
    if not HEADER_NAME.fullmatch(fleet.session_header):
        raise ConfigError(f"--session-header {fleet.session_header[:200]}: give the name of a header")
    if fleet.worker_api_key is not None:
        check_access(ServerSettings(api_key=(fleet.worker_api_key,)))
    if fleet.forward_api_key and not door.api_key:
        raise ConfigError("--forward-api-key needs --api-key: without one the client's key is sent on anyway, unless --worker-api-key is")
    check_access(access(settings))
