"""The KV pool: one memfd holds every layer's pages, so that later a peer process can map the same memory by file descriptor.

Layer l starts at byte `l * pages * layout.page_bytes`, page p of it `p * layout.page_bytes` further on. Invariant: all memory is touched
before the constructor returns, so a running server never finds out late that there is too little. Built once by `engine.runner`.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import torch

from radixpd.errors import ConfigError
from radixpd.kv.layout import KVLayout

__all__ = ["Pool", "available_bytes", "require_memory"]

SPARE_BYTES = 256 << 20  # left to the rest of the machine: filling memory to the brim ends in the kernel's OOM killer
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def available_bytes() -> int:
    """Memory that this process may still take: what the kernel calls available, and no more than its cgroup leaves."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, current = (group / "memory.max").read_text().strip(), (group / "memory.current").read_text()
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - int(current))


def require_memory(layout: KVLayout, pages: int) -> None:
    """Raise ConfigError when the pool does not fit; called before anything slow (weights) and before anything is touched."""
    need, have = pool_bytes(layout, pages), available_bytes() - SPARE_BYTES
    if need <= have:
        return
    raise ConfigError(
        f"the KV pool of {pages * layout.page_size} tokens needs {need / 2**30:.2f} GiB, but only {max(have, 0) / 2**30:.2f} GiB of memory "
        "can be used: lower --max-total-tokens or --mem-fraction-static"
    )


def pool_bytes(layout: KVLayout, pages: int) -> int:
    """Size of the pool: all layers."""
    return layout.layers * pages * layout.page_bytes


class Pool:
    """All KV pages of one rank. `layers[l]` is `[pages, 2, page_size, kv_heads, head_dim]`; `fd` names the memory."""

    def __init__(self, layout: KVLayout, pages: int) -> None:
        require_memory(layout, pages)
        self.layout = layout
        self.pages = pages
        self.fd, memory = touched_memory(pool_bytes(layout, pages))
        shape = (pages, 2, layout.page_size, layout.kv_heads, layout.head_dim)
        whole = torch.frombuffer(memory, dtype=DTYPES[layout.dtype]).view(layout.layers, *shape)
        self.layers: list[torch.Tensor] = list(whole.unbind(0))

    def copy_pages(self, source_ids: np.ndarray, target_ids: np.ndarray) -> None:
        """Copy whole pages in every layer. All sources are read before any target is written."""
        source = torch.from_numpy(np.asarray(source_ids, dtype=np.int64))
        target = torch.from_numpy(np.asarray(target_ids, dtype=np.int64))
        for layer in self.layers:
            layer[target] = layer[source]

    def close(self) -> None:
        """Give the memory back. It is unmapped when the last tensor over it is gone, never under a tensor that is still in use."""
        self.layers = []
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def touched_memory(size: int) -> tuple[int, mmap.mmap]:
    """A memfd of `size` bytes and its mapping, every page of it present."""
    fd = os.memfd_create("radixpd-kv", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        # Touching a mapping without memory behind it kills the process; fallocate says so.
        os.posix_fallocate(fd, 0, size)
        memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
        # One write a page is several times faster than MAP_POPULATE (2 against 9 s for 5 GiB, measured).
        np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
        return fd, memory
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"the KV pool needs {size / 2**30:.2f} GiB of shared memory, which the system refused ({error.strerror}), with "
            f"{available_bytes() / 2**30:.2f} GiB of memory free: lower --max-total-tokens or --mem-fraction-static"
        ) from error
