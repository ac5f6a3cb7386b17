"""Routes of SGLang's and OpenAI's APIs that this server does not have, with the sentence that says so.

A client that asks for one learns what it asked for, instead of a bare "not found". Invariant: no path here is also a route (a test holds
this). Called by the application where no route matches.
"""

from __future__ import annotations

__all__ = ["UNSUPPORTED", "unsupported"]

UNSUPPORTED: dict[str, tuple[str, ...]] = {
    "radixpd serves text generation only, no embeddings, scores, classes or ranks": (
        "/encode", "/classify", "/score", "/rerank", "/embeddings", "/v1/embeddings",
        "/v1/classify", "/v1/score", "/v1/rerank", "/v2/rerank",
    ),
    "radixpd has no responses or conversations API: use /v1/chat/completions": ("/v1/responses", "/v1/conversations"),
    "radixpd speaks SGLang's and OpenAI's APIs only": (
        "/v1/messages", "/api/chat", "/api/generate", "/api/tags", "/invocations", "/vertex_generate",
    ),
    "radixpd takes no files or batches: send requests at the same time, or a list of prompts": (
        "/v1/files", "/v1/batches", "/generate_from_file",
    ),
    "radixpd generates no audio or images": ("/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime"),
    "radixpd keeps no sessions: send the whole prompt, its start is found in the cache": ("/open_session", "/close_session"),
    "radixpd cannot change the weights of a running server": (
        "/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed", "/update_weights_from_ipc",
        "/update_weight_version", "/get_weight_version", "/get_weights_by_name", "/init_weights_update_group",
        "/destroy_weights_update_group", "/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance",
    ),
    "radixpd does not serve LoRA adapters yet": (
        "/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    ),
    "radixpd parses tool calls and reasoning in /v1/chat/completions only": ("/parse_function_call", "/separate_reasoning"),
    "radixpd keeps KV in one memory tier so far": ("/clear_hicache_storage_backend", "/hicache"),
    "radixpd holds its memory until it ends": ("/release_memory_occupation", "/resume_memory_occupation"),
    "radixpd serves dense models only so far": (
        "/start_expert_distribution_record", "/stop_expert_distribution_record", "/dump_expert_distribution_record",
    ),
    "radixpd's settings are those of its start": ("/set_internal_state", "/slow_down"),
}  # fmt: skip

LONGEST = 2  # words of a path above

_REASONS = {path: reason for reason, paths in UNSUPPORTED.items() for path in paths}


def unsupported(path: str) -> str | None:
    """Why there is no such route; None for a path that nobody knows. What lies below a known path is of its kind."""
    words = path.split("/", LONGEST + 1)[: LONGEST + 1]
    return next((reason for end in range(len(words), 1, -1) if (reason := _REASONS.get("/".join(words[:end])))), None)
