"""Torch's process-wide settings, put back after a test that starts the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def restore_torch() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    torch.set_grad_enabled(True)
