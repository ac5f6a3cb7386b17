"""Layer by layer: each layer is told once, in order, when its KV is in the pool and before the next one is computed."""

from __future__ import annotations

import torch

from radixpd.attention.base import AttentionInputs
from radixpd.attention.torch_native import TorchNative
from radixpd.engine.layerwise import telling
from radixpd.kv.layout import KVLayout
from radixpd.kv.pool import Pool


def test_a_layer_is_told_when_its_kv_is_there_and_the_answer_is_unchanged():
    pool = Pool(KVLayout(layers=3, kv_heads=1, head_dim=4, page_size=4, dtype="float32"), 2)
    backend = TorchNative(pool.layers, 2, 4)
    ints = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    inputs = AttentionInputs(ints(0, 3), ints(0, 1), ints(1), ints(3), 4)
    told = []

    def layer_done(layer):
        told.append((layer, [bool(each.any()) for each in pool.layers]))

    q, k, v = torch.randn(3, 3, 2, 4), torch.randn(3, 3, 1, 4), torch.randn(3, 3, 1, 4)
    attend = telling(backend.plan(inputs), layer_done)
    outs = [attend(layer, q[layer], k[layer], v[layer]) for layer in range(3)]
    assert told == [(0, [True, False, False]), (1, [True, True, False]), (2, [True, True, True])]
    plain = backend.plan(inputs)
    assert all(torch.equal(out, plain(layer, q[layer], k[layer], v[layer])) for layer, out in enumerate(outs))
    pool.close()
