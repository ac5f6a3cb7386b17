"""From resolved settings to a runner that is ready for its first plan. Called once, by the runner process.

Order: what can fail fast comes first, so that too little memory is one line within a second and not the end of a long load.
"""

from __future__ import annotations

import logging
from pathlib import Path

from radixpd.attention.registry import build_attention
from radixpd.config.resolve import Resolved
from radixpd.engine.device import start_device
from radixpd.engine.parallel import Solo
from radixpd.engine.runner import Runner
from radixpd.errors import ConfigError
from radixpd.kv.layout import KVLayout
from radixpd.kv.pool import Pool, require_memory
from radixpd.models.decoder import Decoder
from radixpd.models.weights import fingerprint, load_decoder

__all__ = ["build_runner"]

logger = logging.getLogger(__name__)


def build_runner(resolved: Resolved) -> Runner:
    """Start the device, load the weights, touch the pool. Raises ConfigError when something does not fit."""
    device = start_device(resolved.settings.engine)
    logger.info("model runner: %s, weights and KV in %s", device, resolved.dtype)
    layout = KVLayout(**resolved.layout)
    require_memory(layout, resolved.pages)
    directory, load_format = Path(resolved.directory), resolved.settings.model.load_format
    model = _load(resolved)
    if (model.kv_heads, model.spec.head_dim) != (layout.kv_heads, layout.head_dim):
        shape = f"{model.kv_heads} KV heads of {model.spec.head_dim}"
        raise ConfigError(f"--model-path: the weights have {shape}, the pool was laid out for {layout.kv_heads} of {layout.head_dim}")
    pool = Pool(layout, resolved.pages)
    attention = build_attention(resolved.settings.engine.attention_backend, pool.layers, heads=model.heads, head_dim=layout.head_dim)
    return Runner(
        model,
        attention,
        pool,
        slots=resolved.max_running,
        context_length=resolved.context_length,
        vocab_size=resolved.model.vocab_size,
        eos_ids=resolved.eos_ids,
        fingerprint=fingerprint(directory, dtype=resolved.dtype, load_format=load_format, seed=resolved.seed),
    )


def _load(resolved: Resolved) -> Decoder:
    """The model with its weights. What is wrong with its files is told with the flag and the path that the user gave."""
    model = resolved.settings.model
    try:
        return load_decoder(
            Path(resolved.directory), dtype=resolved.dtype, load_format=model.load_format, seed=resolved.seed, parallel=Solo()
        )
    except ConfigError as error:
        raise ConfigError(str(error) if str(error).startswith("--") else f"--model-path {model.model_path}: {error}") from None
