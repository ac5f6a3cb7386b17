"""Starting the device."""

from __future__ import annotations

import pytest
import torch

from radixpd.config.settings import EngineSettings
from radixpd.engine.device import start_device
from radixpd.errors import ConfigError

pytestmark = pytest.mark.usefixtures("restore_torch")


def test_threads_denormals_and_gradients():
    device = start_device(EngineSettings(threads=2))
    assert (torch.get_num_threads(), device.threads) == (2, 2)
    assert not torch.is_grad_enabled()
    assert torch.tensor([1e-40]).mul(1.0).item() == 0.0
    assert str(device).startswith("cpu (2 threads, ")


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="--device cuda"):
        start_device(EngineSettings(device="cuda"))
