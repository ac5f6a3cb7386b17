"""Two pools with a mover each, and somebody who listens to what they report. Also a process of its own: `python moving.py ROLE ...`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from functools import cache
from pathlib import Path
from selectors import DefaultSelector

import numpy as np
import pytest
import torch

from radixpd.core.handoff import ExpectRoom, Landed
from radixpd.core.step import Send
from radixpd.errors import ConfigError
from radixpd.kv.arrivals import Arrivals
from radixpd.kv.layout import KVLayout
from radixpd.kv.mover import Mover, MoverOptions
from radixpd.kv.pool import Pool
from radixpd.kv.transport import Endpoint, Ground, TransportOptions, create

TOKEN = b"0123456789abcdef-a-token"
LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=8, page_size=16, dtype="float32")
P, D = "prefill:1", "decode:1"
PATIENCE = 20.0


@cache
def why_missing(backend):
    """Why a transport cannot be had here; empty if it can."""
    try:
        create(backend, Ground(DefaultSelector(), Arrivals(1, 1), {}))
    except ConfigError as error:
        return str(error)
    return ""


def need(backend):
    """Skip the test where the transport's package, or a library that it needs, is not installed."""
    if reason := why_missing(backend):
        pytest.skip(reason)


def ids(*values):
    return np.array(values, dtype=np.int32)


def send(source, target, *, ticket=1, room=7, ready=None, peer=D):
    source, target = np.asarray(source, dtype=np.int32), np.asarray(target, dtype=np.int32)
    return Send(ticket, room, peer, source, target, len(source) if ready is None else ready)


def until(condition, what="it"):
    """Look again and again until it is so."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {PATIENCE:g} s"
        time.sleep(0.002)


class Reports:
    """What a mover has said."""

    def __init__(self):
        self.all = []
        self._changed = threading.Condition()

    def __call__(self, report):
        with self._changed:
            self.all.append(report)
            self._changed.notify_all()

    def wait(self, *wanted):
        """Until each of these has been reported; `wanted` are reports or predicates."""
        with self._changed:
            came = self._changed.wait_for(lambda: all(self.has(each) for each in wanted), PATIENCE)
        assert came, f"waited for {wanted}, got {self.all}"

    def has(self, wanted):
        if isinstance(wanted, Landed):  # whatever it took
            return any(each.room == wanted.room for each in self.of(Landed))
        return any(wanted(each) for each in self.all) if callable(wanted) else wanted in self.all

    def of(self, kind):
        return [each for each in self.all if isinstance(each, kind)]


class Side:
    """A pool with its mover."""

    def __init__(self, backend, *, pages=64, layout=LAYOUT, codec="none", link_gbps=0.0, stall=20.0, fill=False, **transport):
        self.pool = Pool(layout, pages)
        if fill:
            generator = torch.Generator().manual_seed(1)
            for layer in self.pool.layers:
                noise = torch.randint(1, 255, layer.view(torch.uint8).shape, dtype=torch.uint8, generator=generator)
                layer.view(torch.uint8).copy_(noise)
        self.reports = Reports()
        options = TransportOptions(**{"connect": 2.0, "grace": 0.2, "patience": 2.0, **transport})
        self.mover = Mover(self.pool, self.reports, MoverOptions((backend,), link_gbps, stall, options, codec))

    @property
    def endpoint(self):
        return self.mover.endpoints[0]

    @property
    def transport(self):
        (transport,) = self.mover._transports.values()
        return transport

    @property
    def reception(self):
        """Who is connected here."""
        return getattr(self.transport, "_talk", self.transport)._reception

    def page(self, layer, page):
        return self.pool.layers[layer][page].view(torch.uint8)

    def do(self, act):
        """Run it on the mover's thread."""
        done = threading.Event()
        result = []

        def run():
            try:
                result.append(act())
            finally:
                done.set()

        self.mover._put(run)
        assert done.wait(PATIENCE)
        return result[0]

    def close(self):
        ended = self.mover.close(10.0)
        self.pool.close()
        assert ended


class Pair:
    """Prefill `p` can write into decode `d`."""

    def __init__(self, backend, **options):
        self.d = Side(backend, **options)
        self.p = Side(backend, fill=True, **options)
        self.d.mover.admit(P, TOKEN)
        self.p.mover.connect(D, (self.d.endpoint,), TOKEN)

    def expect(self, *pages, room=7, peer=P):
        self.d.mover.order(ExpectRoom(room, peer, np.array(pages, dtype=np.int32)))

    def same(self, source, target, layers=None):
        """Whether the pages are equal, bit for bit."""
        layers = range(self.p.pool.layout.layers) if layers is None else layers
        pages = [(int(own), int(there)) for own, there in zip(source, target, strict=True)]
        return all(torch.equal(self.p.page(layer, own), self.d.page(layer, there)) for layer in layers for own, there in pages)

    def close(self):
        self.p.close()
        self.d.close()


def spawn(role, backend, pages=64):
    """A process of its own; see `main`."""
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), str(here.parents[1])]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(here / "moving.py"), role, backend, str(pages)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def end(child):
    """Whatever it does."""
    child.kill()
    child.communicate()


class Receiver:
    """A decode side in a process of its own."""

    def __init__(self, backend, pages=64):
        self._child = spawn("decode", backend, pages)
        self.endpoint = Endpoint(**json.loads(self._child.stdout.readline()))

    def expect(self, room, pages):
        self._child.stdin.write(" ".join(map(str, [room, *pages])) + "\n")
        self._child.stdin.flush()
        assert self._child.stdout.readline() == "expected\n"

    def pause(self):
        self._child.send_signal(signal.SIGSTOP)

    def resume(self):
        self._child.send_signal(signal.SIGCONT)

    def end(self):
        end(self._child)


def main():
    """A process of its own. `decode BACKEND`: admits P, says its endpoint, obeys `expect ROOM PAGES`. `prefill BACKEND`: reads an endpoint,
    begins a send of which only the first layer is ever computed."""
    role, backend, pages = sys.argv[1], sys.argv[2], int(sys.argv[3])
    side = Side(backend, fill=role == "prefill", pages=pages)
    if role == "decode":
        side.mover.admit(P, TOKEN)
        print(json.dumps(asdict(side.endpoint)), flush=True)
        for line in sys.stdin:
            room, *rest = map(int, line.split())
            side.mover.order(ExpectRoom(room, P, np.array(rest, dtype=np.int32)))
            side.do(lambda: None)
            print("expected", flush=True)
        return
    side.mover.connect(D, (Endpoint(**json.loads(sys.stdin.readline())),), TOKEN)
    side.mover.begin([send(range(4), range(4), ready=0)])
    side.mover.layer_done(0)
    sys.stdin.read()


if __name__ == "__main__":
    main()
