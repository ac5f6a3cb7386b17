"""The KV pool: its shape, its memory, its copies, and what it says when there is too little."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
import torch

from radixpd.errors import ConfigError
from radixpd.kv.layout import KVLayout
from radixpd.kv.pool import Pool, require_memory

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=4, page_size=8, dtype="float32")


@pytest.fixture
def pool():
    pool = Pool(LAYOUT, 5)
    yield pool
    pool.close()


def test_layers_have_the_layouts_shape_and_start_at_zero(pool):
    assert [tuple(layer.shape) for layer in pool.layers] == [(5, 2, 8, 2, 4)] * 3
    assert all(layer.is_contiguous() and not layer.any() for layer in pool.layers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_mapping_of_the_descriptor_sees_each_page_where_the_layout_says(dtype):
    layout = KVLayout(layers=3, kv_heads=2, head_dim=4, page_size=8, dtype=dtype)
    pool = Pool(layout, 5)
    for number, layer in enumerate(pool.layers):
        layer.copy_(torch.arange(5).view(5, 1, 1, 1, 1) + 10 * number)
    with mmap.mmap(pool.fd, 3 * 5 * layout.page_bytes, prot=mmap.PROT_READ) as peer:
        for number in range(3):
            for page in range(5):
                start = (number * 5 + page) * layout.page_bytes
                values = torch.frombuffer(bytearray(peer[start : start + layout.page_bytes]), dtype=pool.layers[0].dtype)
                assert (values == 10 * number + page).all()
    pool.close()


def test_all_memory_is_present_at_once():
    pool = Pool(KVLayout(layers=2, kv_heads=2, head_dim=64, page_size=16, dtype="float32"), 64)
    stat = os.fstat(pool.fd)
    assert stat.st_size == 2 * 64 * pool.layout.page_bytes
    assert stat.st_blocks * 512 >= stat.st_size
    pool.close()


def test_copy_pages_copies_every_layer_and_nothing_else(pool):
    for number, layer in enumerate(pool.layers):
        layer.copy_(torch.arange(5).view(5, 1, 1, 1, 1) + 10 * number)
    pool.copy_pages(np.array([1, 1, 4], dtype=np.int32), np.array([0, 4, 3], dtype=np.int32))
    for number, layer in enumerate(pool.layers):
        # Page 4 is a source and a target: page 3 gets what it held before.
        assert (layer.flatten(1) - 10 * number == torch.tensor([1, 1, 2, 4, 1]).view(5, 1)).all()


def test_close_gives_up_the_descriptor_and_spares_tensors_in_use():
    pool = Pool(LAYOUT, 5)
    fd, layer = pool.fd, pool.layers[0]
    pool.close()
    pool.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    assert layer.sum() == 0


def test_too_little_memory_names_both_options_and_both_sizes():
    with pytest.raises(ConfigError, match=r"needs 1430511\.47 GiB, but only \d+\.\d\d GiB.*--max-total-tokens or --mem-fraction-static"):
        Pool(LAYOUT, 10**12)


def test_memory_is_checked_against_what_is_free(monkeypatch):
    need = 3 * 5 * LAYOUT.page_bytes
    monkeypatch.setattr("radixpd.kv.pool.available_bytes", lambda: need + (256 << 20))
    require_memory(LAYOUT, 5)
    monkeypatch.setattr("radixpd.kv.pool.available_bytes", lambda: need + (256 << 20) - 1)
    with pytest.raises(ConfigError):
        require_memory(LAYOUT, 5)


def test_a_refusing_system_is_a_config_error_too(monkeypatch):
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    with pytest.raises(ConfigError, match=r"No space left on device.*--max-total-tokens"):
        Pool(LAYOUT, 5)
