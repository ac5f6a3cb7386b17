"""SGLang flags that radixpd knows but does not have, each with the sentence that refuses it; plus the aliases that users type.

Whole families are refused by prefix; their well-known members are listed too, so that a misspelt one is recognised.
Invariant: no name here is also a field of `Settings` (a test holds this): a flag that gains support moves out of this table.
Called by `config.cli`.
"""

from __future__ import annotations

__all__ = ["ALIASES", "REFUSED", "REFUSED_PREFIXES", "VALUE_REASONS", "refusal"]

ALIASES = {"model": "model-path", "tp": "tp-size", "tensor-parallel-size": "tp-size"}

PD = "radixpd's decode servers reserve pages as --schedule-conservativeness says, and its pairs have one tp size"
TIERS = "radixpd keeps KV in one memory tier so far"
LORA = "radixpd does not serve LoRA adapters yet"
SPECULATION = "radixpd does not decode speculatively yet"
PARALLEL = "radixpd runs one model runner on one machine so far"
EXPERTS = "radixpd serves dense models only so far"
GPU = "radixpd runs on a CPU so far"
JSON = "radixpd writes constrained JSON with one space behind each comma and colon, and no other white space"
TOOL_SERVERS = "radixpd calls no tools itself: clients do"
QUANTISATION = "radixpd computes in float32 or bfloat16 only (a .gguf file is dequantised when it is loaded)"
KINDS = "radixpd serves text generation only, no embedding, reward or multimodal models"
HYBRID = "radixpd serves models with full attention only"
TOKENIZER = "radixpd has one tokenizer mode, in the API process"
SCHEDULER = "radixpd's scheduler has no such choice"
PRIORITY = "radixpd orders by priority with --schedule-policy priority and never preempts for it"
OBSERVE = "radixpd does not record this; see --log-level, --log-requests and /metrics"
SERVER = "radixpd's HTTP server does not offer this"
TEMPLATES = "radixpd takes a chat template from the model or from --chat-template"
MODEL = "radixpd takes the model's files as they are"

_BY_REASON: dict[str, tuple[str, ...]] = {
    PD: ("num-reserved-decode-tokens",),
    TIERS: (
        "enable-hierarchical-cache", "hicache-ratio", "hicache-size", "hicache-write-policy", "hicache-storage-backend",
        "hicache-storage-prefetch-policy", "enable-lmcache", "cpu-offload-gb",
    ),
    LORA: ("enable-lora", "lora-paths", "max-loras-per-batch", "max-loaded-loras", "max-lora-rank", "enable-lora-overlap-loading"),
    SPECULATION: ("speculative-algorithm", "speculative-draft-model-path", "speculative-num-steps", "speculative-num-draft-tokens"),
    PARALLEL: (
        "pp-size", "pp", "pipeline-parallel-size", "dp-size", "dp", "data-parallel-size", "load-balance-method", "attn-cp-size",
        "enable-dp-attention", "enable-dp-lm-head", "nnodes", "node-rank", "dist-init-addr", "enable-prefill-delayer",
        "enable-two-batch-overlap", "enable-single-batch-overlap",
    ),
    EXPERTS: ("ep-size", "ep", "expert-parallel-size", "enable-eplb", "ep-num-redundant-experts"),
    GPU: (
        "base-gpu-id", "gpu-id-step", "cuda-graph-max-bs", "cuda-graph-bs", "disable-cuda-graph", "disable-cuda-graph-padding",
        "enable-torch-compile", "enable-deterministic-inference", "rl-on-policy-target", "enable-memory-saver",
        "prefill-attention-backend", "decode-attention-backend",
    ),
    JSON: ("constrained-json-whitespace-pattern", "constrained-json-disable-any-whitespace"),
    TOOL_SERVERS: ("tool-server",),
    QUANTISATION: ("quantization", "quantization-param-path", "torchao-config"),
    KINDS: (
        "is-embedding", "multi-item-scoring-delimiter", "mm-attention-backend", "enable-multimodal", "encoder-only", "language-only",
        "encoder-urls", "encoder-transfer-backend",
    ),
    HYBRID: ("max-mamba-cache-size", "disable-hybrid-swa-memory"),
    TOKENIZER: (
        "tokenizer-mode", "tokenizer-worker-num", "skip-tokenizer-init", "enable-dynamic-batch-tokenizer", "enable-tokenizer-batch-encode",
    ),
    SCHEDULER: (
        "num-continuous-decode-steps", "scheduler-recv-interval", "sleep-on-idle", "prefill-max-requests", "enable-dynamic-chunking",
    ),
    PRIORITY: (
        "enable-priority-scheduling", "schedule-low-priority-values-first", "abort-on-priority-when-disabled",
        "priority-scheduling-preemption-threshold",
    ),
    OBSERVE: (
        "log-requests-target", "enable-request-time-stats-logging", "enable-trace", "otlp-traces-endpoint", "export-metrics-to-file",
        "show-time-cost",
    ),
    SERVER: (
        "grpc-mode", "skip-server-warmup", "warmups", "enable-custom-logit-processor",
    ),
    TEMPLATES: ("hf-chat-template-name", "completion-template"),
    MODEL: ("revision", "json-model-override-args"),
}  # fmt: skip

REFUSED = {name: reason for reason, names in _BY_REASON.items() for name in names}

REFUSED_PREFIXES = {
    "constrained-json-": JSON,
    "debug-tensor-dump-": OBSERVE,
    "deepep-": EXPERTS,
    "disaggregation-decode-": PD,
    "disaggregation-prefill-": PD,
    "hicache-": TIERS,
    "lora-": LORA,
    "mamba-": HYBRID,
    "moe-": EXPERTS,
    "prefill-delayer-": PARALLEL,
    "router-": "radixpd has no router in its server command",
    "speculative-": SPECULATION,
    "swa-": HYBRID,
}

VALUE_REASONS = {
    "tp-size": PARALLEL,
    "kv-cache-dtype": "radixpd keeps KV in the model's precision so far",
    "device": GPU,
    "attention-backend": GPU,
    "sampling-backend": GPU,
}
"""Why a flag that radixpd has takes fewer values than SGLang's: appended when one is refused."""


def refusal(name: str) -> str | None:
    """The sentence for a known flag that is missing (`name` without dashes in front), or None for any other name."""
    reason = REFUSED.get(name)
    if reason is None:
        reason = next((text for prefix, text in REFUSED_PREFIXES.items() if name.startswith(prefix)), None)
    return reason
