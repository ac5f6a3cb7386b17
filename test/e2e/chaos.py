"""A prefill/decode pair whose processes are killed, stopped, started again, and whose connections are cut.

A `Group` starts like a `Pair` and knows how to start each server again on its ports. Used by the chaos tests.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

from e2e.pd import Pair
from e2e.servers import Server, free_port, until

__all__ = ["Group", "cannot_cut"]

SIDES = ("prefill", "decode")


def cannot_cut() -> str:
    """Why connections cannot be cut from outside here; empty if they can."""
    if shutil.which("ss") is None:
        return "ss (iproute2) is not installed"
    return "" if os.geteuid() == 0 else "cutting other processes' connections needs root"


class Group:
    """A pair, and how its servers are started. `link`: gigabits a second of the link between them, 0 as fast as it goes."""

    def __init__(self, model: Path, *flags: str, decode: tuple[str, ...] = (), link: float = 0.0) -> None:
        self.model = model
        self.bootstrap = free_port()
        paced = ("--disaggregation-link-gbps", str(link)) if link else ()
        role = {
            "prefill": ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(self.bootstrap), *paced),
            "decode": ("--disaggregation-mode", "decode", *decode),
        }
        self.flags = {side: (*role[side], *flags) for side in SIDES}
        self.servers = {side: Server(model, *self.flags[side], wait=False) for side in SIDES}
        for server in self.servers.values():
            server.wait_ready()

    @property
    def pair(self) -> Pair:
        """As it is now."""
        return Pair(self.servers["prefill"], self.servers["decode"], self.bootstrap)

    def _processes(self, side: str) -> list[int]:
        server = self.servers[side]
        return [server.process.pid, *server.children().values()]

    def kill(self, side: str) -> None:
        """kill -9 the supervisor; its children die with it."""
        processes = self._processes(side)
        self.servers[side].process.kill()
        self.servers[side].process.wait(10)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), "every process of the server is gone")

    def start(self, side: str) -> None:
        """Again, on the same ports."""
        self.servers[side] = Server(self.model, *self.flags[side], port=self.servers[side].port)

    def signal(self, side: str, number: int) -> None:
        """To every process of a server at once."""
        for pid in self._processes(side):
            os.kill(pid, number)

    def cut(self) -> None:
        """Every connection between the two ends at once, as by a firewall that resets."""
        ports = {self.bootstrap, *(port for side in SIDES for port in self._data_ports(side))}
        for port in ports:
            subprocess.run(["ss", "-K", f"( sport = :{port} or dport = :{port} )"], capture_output=True, timeout=10, check=False)

    def _data_ports(self, side: str) -> list[int]:
        """Where the runner listens; nowhere, with shared memory alone."""
        runner = self.servers[side].children()["runner"]
        listing = subprocess.run(["ss", "-Htlnp"], capture_output=True, text=True, timeout=10, check=True).stdout
        return [int(found[1]) for line in listing.splitlines() if f"pid={runner}," in line and (found := re.search(r":(\d+)\s", line))]

    def pools_mapped(self, side: str) -> int:
        """KV pools that its runner has mapped: its own and its peers'."""
        runner = self.servers[side].children()["runner"]
        lines = Path(f"/proc/{runner}/maps").read_text().splitlines()
        return len({line.split()[4] for line in lines if "memfd:radixpd-kv" in line})

    def close(self) -> None:
        """Whatever state they are in; those that live must end well."""
        for side, server in self.servers.items():
            if server.process.poll() is None:
                self.signal(side, signal.SIGCONT)
                server.terminate()
        codes = {side: server.close() for side, server in self.servers.items() if server.process.returncode is None}
        assert codes == dict.fromkeys(codes, 0), {side: (codes[side], self.servers[side].log[-3000:]) for side in codes}
