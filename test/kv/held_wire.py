"""A wire that writes when it is told to: `pigeon`, for tests of what goes on around one. Registered by name, like any transport."""

from __future__ import annotations

import ctypes

from radixpd.kv.one_sided import OneSided


class HeldWire:
    """`begin`: whether writes begin at once. They end with `finish`."""

    def __init__(self):
        self.begin = True
        self.known = {}
        self.held = {}  # number -> (peer, parts): not begun
        self.begun = {}
        self.calls = []
        self._ended = []

    def open(self, rows):
        return "loft"

    def meet(self, peer, at):
        self.known[peer] = at

    def part(self, peer):
        self.calls.append(("part", peer))
        self.known.pop(peer)

    def write(self, peer, number, parts):
        (self.begun if self.begin else self.held)[number] = peer, parts

    def withdraw(self, number):
        return self.held.pop(number, None) is not None

    def poll(self):
        ended, self._ended = self._ended, []
        return ended

    def close(self):
        self.calls.append(("close",))

    def finish(self, error=""):
        """Everything that has begun ends; without an error its bytes are there."""
        for number, (_, parts) in self.begun.items():
            if not error:
                for own, there, size in parts.tolist():
                    ctypes.memmove(there, own, size)
            self._ended.append((number, error))
        self.begun = {}


def transport(ground):
    """See `radixpd.kv.transport.TRANSPORTS`."""
    return OneSided("pigeon", ground, HeldWire())
