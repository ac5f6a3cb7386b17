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
from radixpd.kv.layout import KVLayout
from radixpd.kv.pool import Pool, require_memory
from radixpd.models.weights import load_decoder

__all__ = ["build_runner"]

logger = logging.getLogger(__name__)


def build_runner(resolved: Resolved) -> Runner:
    """Start the device, load the weights, touch the pool. Raises ConfigError when something does not fit."""
    device = start_device(resolved.settings.engine)
    logger.info("model runner: %s, weights and KV in %s", device, resolved.dtype)
    layout = KVLayout(**resolved.layout)
    require_memory(layout, resolved.pages)
    model = load_decoder(
        Path(resolved.directory),
        dtype=resolved.dtype,
        load_format=resolved.settings.model.load_format,
        seed=resolved.seed,
        parallel=Solo(),
    )
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
    )
