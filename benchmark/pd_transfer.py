"""How long a prompt's KV takes from one pool to another: predicted from its bytes, measured with two movers over a paced link.

Measured is the time from the order to send until the receiver's mover reports that the last byte has landed, all pages being computed
already; both movers live in this process, so one clock times both. Called by `bench_pd`.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from radixpd.core.handoff import ExpectRoom, Failure, Landed, MoverReport, TicketDone
from radixpd.core.step import Send
from radixpd.errors import PeerFailed
from radixpd.kv.layout import KVLayout
from radixpd.kv.mover import Mover, MoverOptions
from radixpd.kv.pool import Pool

__all__ = ["SHAPES", "Wire", "predicted", "prompt_bytes"]

PAGE_SIZE = 16
TOKEN = b"both ends are in this process"
PATIENCE = 60.0  # seconds for one prompt
SHAPES = {
    "demo (30 layers, 3 KV heads of 64)": KVLayout(30, 3, 64, PAGE_SIZE, "bfloat16"),
    "70B (80 layers, 8 KV heads of 128)": KVLayout(80, 8, 128, PAGE_SIZE, "bfloat16"),
}


def prompt_bytes(layout: KVLayout, tokens: int) -> int:
    """Of a prompt's KV, in whole pages."""
    return -(-tokens // layout.page_size) * layout.page_bytes * layout.layers


def predicted(layout: KVLayout, tokens: int, gbps: float) -> float:
    """Seconds that the bytes take on a link of so many gigabits a second."""
    return prompt_bytes(layout, tokens) * 8 / (gbps * 1e9)


@dataclass(slots=True, eq=False)
class Wire:
    """Two pools of one prompt each, and the movers between them."""

    layout: KVLayout
    pages: int
    writer: Mover
    reader: Mover
    ready: threading.Event
    reports: list[tuple[float, MoverReport]]
    rooms: int = 0

    @staticmethod
    @contextmanager
    def open(layout: KVLayout, tokens: int, backend: str, gbps: float) -> Iterator[Wire]:
        """`gbps` of 0: as fast as it goes."""
        pages = -(-tokens // layout.page_size)
        ready, reports = threading.Event(), list[tuple[float, MoverReport]]()

        def report(message: MoverReport) -> None:
            reports.append((time.monotonic(), message))
            ready.set()

        target, source = Pool(layout, pages), Pool(layout, pages)
        reader = Mover(target, report, MoverOptions((backend,)))
        writer = Mover(source, report, MoverOptions((backend,), gbps))
        try:
            reader.admit("writer", TOKEN)
            writer.connect("reader", reader.endpoints, TOKEN)
            yield Wire(layout, pages, writer, reader, ready, reports)
        finally:
            writer.close()
            reader.close()
            source.close()
            target.close()

    def seconds(self, repeats: int) -> float:
        """The median of `repeats` prompts, after one that pays for connections and first touches."""
        self._once()
        return statistics.median(self._once() for _ in range(repeats))

    def _once(self) -> float:
        self.rooms += 1
        room, pages = self.rooms, np.arange(self.pages, dtype=np.int32)
        self.reader.order(ExpectRoom(room, "writer", pages))
        began = time.monotonic()
        self.writer.begin([Send(room, room, "reader", pages, pages, len(pages))])
        deadline = began + PATIENCE
        landed = None
        while landed is None or not any(isinstance(each, TicketDone) and each.ticket == room for _, each in self.reports):
            self.ready.wait(max(0.0, deadline - time.monotonic()))
            self.ready.clear()
            for when, each in list(self.reports):
                if isinstance(each, Failure) or (isinstance(each, TicketDone) and each.error):
                    raise PeerFailed(f"the transfer failed: {each}")
                if isinstance(each, Landed) and each.room == room:
                    landed = when
            if time.monotonic() > deadline:
                raise PeerFailed(f"nothing landed within {PATIENCE:g} s")
        self.reports.clear()
        return landed - began
