"""Layers on their own: the packed matrix against the plain one, stacked parts, and rope's relative property."""

from __future__ import annotations

import pytest
import torch
from paged import Alone

from radixpd.models.layers import ColumnLinear, Gemm, Place, RowLinear, can_pack, packed_linear, plain_linear
from radixpd.models.rope import Rope, rotate
from radixpd.models.spec import RopeSpec

PLACE = Place(Alone(), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 33])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_equals_plain(dtype: torch.dtype, bias: bool, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(48, 80, generator=generator).to(dtype)
    if not can_pack(weight):
        pytest.skip("oneDNN does not take this precision here")
    offset = torch.randn(48, generator=generator).to(dtype) if bias else None
    wide = torch.randn(rows, 160, generator=generator).to(dtype)
    for x in (wide[:, :80].contiguous(), wide[:, 40:120]):
        # float64 tells a true float32 product from one with shortened mantissas.
        exact = plain_linear(weight.double(), None if offset is None else offset.double())(x.double())
        tolerance = 2e-5 if dtype == torch.float32 else 0.25
        torch.testing.assert_close(packed_linear(weight, offset)(x).double(), exact, atol=tolerance, rtol=0)
        torch.testing.assert_close(plain_linear(weight, offset)(x).double(), exact, atol=tolerance, rtol=0)


def test_packing_copies_so_the_source_may_go() -> None:
    weight = torch.ones(16, 16)
    apply = packed_linear(weight, None)
    weight.zero_()
    assert torch.equal(apply(torch.ones(1, 16)), torch.full((1, 16), 16.0))


def test_stacked_parts_come_out_side_by_side_in_their_own_order() -> None:
    linear = ColumnLinear(4, {"a": 2, "b": 3}, bias=True, place=PLACE)
    tensors = {"a.weight": torch.randn(2, 4), "a.bias": torch.randn(2), "b.weight": torch.randn(3, 4), "b.bias": torch.randn(3)}
    targets = dict(linear.targets())
    assert {name: target.shape for name, target in targets.items()} == {name: tuple(t.shape) for name, t in tensors.items()}
    for name in reversed(tensors):
        targets[name].fill(tensors[name])
    x = torch.randn(5, 4)
    wanted = [x @ tensors[f"{part}.weight"].T + tensors[f"{part}.bias"] for part in "ab"]
    torch.testing.assert_close(linear(x), torch.cat(wanted, dim=1))


def test_a_matrix_cannot_be_used_before_it_is_full() -> None:
    linear = RowLinear("o", 4, 4, bias=True, place=PLACE)
    dict(linear.targets())["o.weight"].fill(torch.ones(4, 4))
    with pytest.raises(AssertionError, match="not loaded"):
        linear(torch.ones(1, 4))


def test_a_gemm_without_bias_takes_none() -> None:
    with pytest.raises(AssertionError, match="no bias"):
        Gemm(2, 2, bias=False, place=PLACE).fill_bias(0, torch.ones(2))


def test_rotation_keeps_lengths_and_sees_only_distances() -> None:
    rope = Rope(RopeSpec(), 32, torch.float32, torch.device("cpu"))
    q, k = torch.randn(1, 1, 32), torch.randn(1, 1, 32)

    def score(a: int, b: int) -> float:
        turned_q = rotate(q, rope(torch.tensor([a])))
        assert turned_q.norm().item() == pytest.approx(q.norm().item(), rel=1e-5)
        return (turned_q * rotate(k, rope(torch.tensor([b])))).sum().item()

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-3)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)
