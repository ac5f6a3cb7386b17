"""What this machine is and how torch runs on it: threads, floating point, inference settings.

`start_device` is called once per runner process, before any tensor exists: new threads inherit the floating point mode of the thread that
starts them, so it must come before the first parallel kernel. CPU only; another device adds its own branch here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from radixpd.config.settings import EngineSettings
from radixpd.errors import ConfigError

__all__ = ["Device", "start_device"]


@dataclass(frozen=True, slots=True)
class Device:
    """The device as it was started; `str()` is for the log."""

    name: str
    threads: int
    capability: str  # best instruction set that torch uses

    def __str__(self) -> str:
        return f"{self.name} ({self.threads} threads, {self.capability})"


def start_device(engine: EngineSettings) -> Device:
    """Set up torch for inference in this process."""
    if engine.device != "cpu":
        raise ConfigError(f"--device {engine.device} is not supported: only cpu is")
    # Denormals cost a hundred times an ordinary number and mean nothing in a softmax's tail.
    torch.set_flush_denormal(True)
    threads = engine.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    return Device(engine.device, threads, torch.backends.cpu.get_cpu_capability())
