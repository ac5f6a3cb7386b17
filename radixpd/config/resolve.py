"""Settings + facts -> `Resolved`: every value the processes need, decided once, before any of them starts.

Invariant: `resolve` is a pure function (the seed is an argument), and a child that reads `from_json(to_json(resolved))` holds the same
values as its parent. Secrets travel in that JSON and nowhere else. Called by the supervisor; every process receives the result.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, replace
from typing import Any

from radixpd.config.access import access_notes, check_access
from radixpd.config.disaggregation import check_disaggregation, complete, disaggregation_notes
from radixpd.config.facts import MachineFacts, ModelFacts, read_machine_facts, read_model_facts
from radixpd.config.secret import Secret
from radixpd.config.settings import CacheSettings, Settings
from radixpd.errors import ConfigError

__all__ = [
    "KVEvents", "MachineFacts", "ModelFacts", "Resolved", "from_json", "public_view", "read_machine_facts", "read_model_facts",
    "resolve", "to_json",
]  # fmt: skip

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
POOL_LIMIT = 8 * 2**30
POOL_SHARE = 0.25
MOST_RUNNING = 256
CHUNK = 512
CACHE_AWARE = ("lpm", "dfs-weight")


@dataclass(frozen=True, slots=True)
class KVEvents:
    """Where KV events are published: ZMQ endpoints to bind. `replay_endpoint` empty = no replay."""

    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str = ""
    topic: str = ""


@dataclass(frozen=True, slots=True)
class Resolved:
    """All decisions. In `settings` only `tokenizer_path`, `chat_template`, `mem_fraction_static`, `kv_events_config`,
    `preferred_sampling_params`, `max_queued_requests`, `request_timeout` and settings of pairs of servers may still be None; there None
    means "none". `notes` are lines for the log of the start."""

    settings: Settings
    directory: str  # the model's files, in Hugging Face's format
    tokenizer_directory: str
    model: ModelFacts
    pages: int
    kv_events: KVEvents | None
    notes: tuple[str, ...]
    peer_secret: Secret | None = None  # that all servers of a disaggregated group share

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.settings.cache.page_size

    @property
    def dtype(self) -> str:
        """Of weights, activations and KV: float32 or bfloat16."""
        return self.settings.model.dtype

    @property
    def layout(self) -> dict[str, Any]:
        """The fields of `KVLayout`: `KVLayout(**resolved.layout)`."""
        return {
            "layers": self.model.layers,
            "kv_heads": self.model.kv_heads,
            "head_dim": self.model.head_dim,
            "page_size": self.page_size,
            "dtype": self.dtype,
        }

    @property
    def pool_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.pages * self.page_size

    @property
    def context_length(self) -> int:
        """Longest prompt plus output that the settings allow."""
        return _known(self.settings.model.context_length)

    @property
    def longest_request(self) -> int:
        """Admission refuses a prompt plus output above this: the context, or the pool where that is smaller."""
        return min(self.context_length, self.pool_tokens)

    @property
    def max_running(self) -> int:
        """Slots."""
        return _known(self.settings.scheduler.max_running_requests)

    @property
    def depth(self) -> int:
        """Steps that may be in flight beyond the one being applied."""
        return 0 if self.settings.scheduler.disable_overlap_schedule else 1

    @property
    def threads(self) -> int:
        """CPU threads of the runner."""
        return _known(self.settings.engine.threads)

    @property
    def seed(self) -> int:
        """The server's seed."""
        return _known(self.settings.engine.random_seed)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end an output."""
        return self.model.eos_ids

    @property
    def served_name(self) -> str:
        """The model's name in the API."""
        return self.settings.model.served_model_name or self.settings.model.model_path


def resolve(
    settings: Settings, *, directory: str, tokenizer_directory: str, model: ModelFacts, machine: MachineFacts, seed: int
) -> Resolved:
    """Replace every "decide for me" of `settings`. `seed` is used when `--random-seed` was not given."""
    _check_pairs(settings)
    check_access(settings.server)
    check_disaggregation(settings.disaggregation)
    dtype = _dtype(settings.model.dtype, model)
    context = _context_length(settings, model)
    pages, pool_note = _pages(settings.cache, model, machine, dtype=dtype)
    scheduler = settings.scheduler
    policy = scheduler.schedule_policy
    notes = [pool_note, *access_notes(settings.server), *disaggregation_notes(settings.disaggregation)]
    if settings.cache.disable_radix_cache and policy in CACHE_AWARE:
        notes.append(f"--schedule-policy {policy} orders by cached prefix; with --disable-radix-cache it is fcfs")
        policy = "fcfs"
    chunk = scheduler.chunked_prefill_size
    final = replace(
        settings,
        model=replace(
            settings.model,
            dtype=dtype,
            context_length=context,
            served_model_name=settings.model.served_model_name or settings.model.model_path,
        ),
        cache=replace(settings.cache, max_total_tokens=pages * settings.cache.page_size),
        scheduler=replace(
            scheduler,
            max_running_requests=scheduler.max_running_requests or max(1, min(MOST_RUNNING, pages // 2)),
            chunked_prefill_size=min(CHUNK, scheduler.max_prefill_tokens) if chunk is None else chunk,
            schedule_policy=policy,
        ),
        engine=replace(
            settings.engine,
            threads=settings.engine.threads or machine.cores,
            random_seed=seed if settings.engine.random_seed is None else settings.engine.random_seed,
        ),
        disaggregation=complete(settings.disaggregation, page_size=settings.cache.page_size),
    )
    return Resolved(
        settings=final,
        directory=directory,
        tokenizer_directory=tokenizer_directory,
        model=model,
        pages=pages,
        kv_events=_kv_events(settings.cache.kv_events_config),
        notes=tuple(notes),
    )


def to_json(resolved: Resolved) -> str:
    """For a child's standard input only: this text holds the secrets."""
    return json.dumps(dataclasses.asdict(resolved), default=_reveal)


def from_json(text: str) -> Resolved:
    """The inverse of `to_json`."""
    return typing.cast(Resolved, _build(Resolved, json.loads(text)))


def public_view(resolved: Resolved) -> dict[str, Any]:
    """Flat JSON-ready view for `/server_info`: every setting that is not secret, under its flag's name, and the derived sizes."""
    view: dict[str, Any] = {}
    for group in dataclasses.fields(resolved.settings):
        values = getattr(resolved.settings, group.name)
        view |= {f.name: getattr(values, f.name) for f in dataclasses.fields(values) if not f.metadata["secret"]}
    view["kv_cache_dtype"] = resolved.dtype
    view["served_model_name"] = resolved.served_name
    view["max_total_num_tokens"] = resolved.pool_tokens
    view["max_request_tokens"] = resolved.longest_request
    view["pages"] = resolved.pages
    view["architecture"] = resolved.model.architecture
    view["vocab_size"] = resolved.model.vocab_size
    return view


def _check_pairs(settings: Settings) -> None:
    scheduler = settings.scheduler
    chunk = scheduler.chunked_prefill_size
    if chunk == 0:
        raise ConfigError("--chunked-prefill-size 0 is out of range: give 1 or more, or -1 to never cut a prompt")
    if chunk is not None and chunk > scheduler.max_prefill_tokens:
        raise ConfigError(f"--chunked-prefill-size {chunk} is more than --max-prefill-tokens {scheduler.max_prefill_tokens}")
    if chunk == -1 and scheduler.enable_mixed_chunk:
        raise ConfigError("--enable-mixed-chunk needs chunks: it cannot go with --chunked-prefill-size -1")
    if settings.cache.kv_events_config is not None and settings.cache.disable_radix_cache:
        raise ConfigError("--kv-events-config has nothing to publish with --disable-radix-cache: drop one of them")


def _dtype(asked: str, model: ModelFacts) -> str:
    if asked != "auto":
        return asked
    return "bfloat16" if model.dtype in ("bfloat16", "float16") else "float32"


def _context_length(settings: Settings, model: ModelFacts) -> int:
    asked = settings.model.context_length
    if asked is None:
        return model.context_length
    if asked > model.context_length:
        raise ConfigError(
            f"--context-length {asked} is more than the {model.context_length} positions (max_position_embeddings) of "
            f"--model-path {settings.model.model_path}"
        )
    return asked


def _pages(cache: CacheSettings, model: ModelFacts, machine: MachineFacts, *, dtype: str) -> tuple[int, str]:
    free = machine.available_memory
    weights = model.parameters * DTYPE_BYTES[dtype]
    if weights >= free:
        raise ConfigError(
            f"--model-path: the weights need {_gib(weights)} in {dtype} (--dtype) and the machine has {_gib(free)} of free memory"
        )
    token_bytes = 2 * model.layers * model.kv_heads * model.head_dim * DTYPE_BYTES[dtype]
    page_bytes = cache.page_size * token_bytes
    if cache.max_total_tokens is not None:
        pages, source = cache.max_total_tokens // cache.page_size, "--max-total-tokens"
        if pages == 0:
            raise ConfigError(f"--max-total-tokens {cache.max_total_tokens} is less than one page: --page-size is {cache.page_size}")
        if weights + pages * page_bytes > free:
            raise ConfigError(
                f"--max-total-tokens {cache.max_total_tokens} needs {_gib(pages * page_bytes)} for the KV pool beside {_gib(weights)} of "
                f"weights; the machine has {_gib(free)} of free memory"
            )
    else:
        fraction = cache.mem_fraction_static
        budget = int(free * fraction) if fraction is not None else min(POOL_LIMIT, int(free * POOL_SHARE))
        source = f"--mem-fraction-static {fraction}" if fraction is not None else "min(8 GiB, 25 % of free memory)"
        pages = min(min(budget, free - weights) // page_bytes, (2**31 - 1) // cache.page_size)
        if pages == 0:
            raise ConfigError(
                f"{_gib(budget)} for the KV pool ({source}) is less than one page of {_gib(page_bytes)}: lower --page-size or raise "
                "--mem-fraction-static"
            )
    return (
        pages,
        f"KV pool: {pages} pages of {cache.page_size} tokens = {pages * cache.page_size} tokens, {_gib(pages * page_bytes)}; {source}",
    )


def _kv_events(text: str | None) -> KVEvents | None:
    if text is None:
        return None
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--kv-events-config is not JSON: {error}") from None
    known = {"publisher", "enable_kv_cache_events", *(f.name for f in dataclasses.fields(KVEvents))}
    if not isinstance(data, dict) or not data.keys() <= known:
        raise ConfigError(f"--kv-events-config must be a JSON object with the keys {', '.join(sorted(known))}")
    publisher, on = data.pop("publisher", "zmq"), data.pop("enable_kv_cache_events", True)
    if publisher not in ("zmq", "null") or not isinstance(on, bool):
        raise ConfigError('--kv-events-config: publisher is "zmq" or "null", enable_kv_cache_events is true or false')
    if publisher == "null" or not on:
        return None
    data = {key: value or "" for key, value in data.items()}
    if not all(isinstance(value, str) for value in data.values()):
        raise ConfigError("--kv-events-config: endpoint, replay_endpoint and topic are strings")
    return KVEvents(**data)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.2f} MiB"


def _known(value: int | None) -> int:
    assert value is not None
    return value


def _reveal(value: object) -> str:
    if isinstance(value, Secret):
        return value.reveal()
    raise TypeError(f"cannot send a {type(value).__name__}")


def _build(kind: Any, value: Any) -> Any:
    """`value`, fresh from JSON, as the annotated type `kind`."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _build(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    if kind is Secret:
        return Secret(value)
    if typing.get_origin(kind) is tuple:
        return tuple(_build(typing.get_args(kind)[0], item) for item in value)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return None if value is None else _build(typing.get_args(kind)[0], value)
    return value
