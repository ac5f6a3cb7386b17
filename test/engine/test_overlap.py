"""Pages travel while the forward runs: layer 0 has landed in another pool before the chunk's last layer starts to be computed."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from radixpd.attention.torch_native import TorchNative
from radixpd.core.handoff import ExpectRoom, Landed, MoverReport
from radixpd.core.request import SamplingParams
from radixpd.core.step import Send, SlotBegin, StepPlan
from radixpd.engine.layerwise import Late
from radixpd.engine.runner import Runner
from radixpd.kv.layout import KVLayout
from radixpd.kv.mover import Mover, MoverOptions
from radixpd.kv.pool import Pool

LAYOUT = KVLayout(layers=4, kv_heads=1, head_dim=4, page_size=4, dtype="float32")
PAGES, PROMPT, PATIENCE = 8, 16, 10.0
TOKEN = b"both ends are in this test"


def ids(*values):
    return np.array(values, dtype=np.int32)


class Layers:
    """A model of bare attention; `before` is called with each layer that is about to be computed."""

    def __init__(self, before):
        self.before = before

    def forward(self, tokens, positions, attend):
        hidden = tokens.float()[:, None, None].expand(len(tokens), 1, 4) + 1
        for layer in range(LAYOUT.layers):
            self.before(layer)
            hidden = hidden + attend(layer, hidden.contiguous(), hidden.contiguous(), hidden.contiguous())
        return hidden.reshape(len(tokens), 4)

    def logits(self, hidden):
        return hidden


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_layer_0_lands_before_the_last_layer_starts(backend, overlap):
    landed = threading.Event()

    def report(message: MoverReport) -> None:
        if isinstance(message, Landed):
            landed.set()

    here, there = Pool(LAYOUT, PAGES), Pool(LAYOUT, PAGES)
    reader, writer = Mover(there, report, MoverOptions((backend,))), Mover(here, report, MoverOptions((backend,)))
    seen = []

    def before(layer):
        """The last layer does not start before layer 0 is over there, or it is clear that it will not come."""
        if layer == LAYOUT.layers - 1:
            waited = threading.Event()
            for _ in range(int((PATIENCE if overlap else 0.2) / 0.01)):
                if there.layers[0][4:8].count_nonzero() == there.layers[0][4:8].numel():
                    break
                waited.wait(0.01)
            seen.append([bool(there.layers[each][4:8].any()) for each in range(LAYOUT.layers)])

    try:
        reader.admit("p", TOKEN)
        writer.connect("d", reader.endpoints, TOKEN)
        reader.order(ExpectRoom(1, "p", ids(4, 5, 6, 7)))
        attention = TorchNative(here.layers, 1, 4)
        runner = Runner(Layers(before), attention, here, slots=1, context_length=32, vocab_size=4, eos_ids=())
        runner.departures = writer if overlap else Late(writer, layers=LAYOUT.layers)
        params = SamplingParams(temperature=0.0, max_new_tokens=1)
        runner.step(
            StepPlan(
                step=1, slots=ids(0), starts=ids(0), lengths=ids(PROMPT), sample_rows=ids(0), sample_slots=ids(0),
                page_slots=ids(0, 0, 0, 0), page_positions=ids(0, 1, 2, 3), page_ids=ids(0, 1, 2, 3),
                begins=(SlotBegin(0, ids(*range(1, PROMPT + 1)), PROMPT, 0, params),),
                sends=(Send(ticket=1, room=1, peer="d", source=ids(0, 1, 2, 3), target=ids(4, 5, 6, 7), ready=0),),
            )
        )  # fmt: skip
        assert landed.wait(PATIENCE)
        assert seen[0][0] == overlap
        assert not seen[0][-1], "the last layer cannot be there before it is computed"
        for own, copy in zip(here.layers, there.layers, strict=True):
            assert torch.equal(own[0:4], copy[4:8])
    finally:
        writer.close()
        reader.close()
        here.close()
        there.close()
