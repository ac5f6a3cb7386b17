"""The wire codecs: sizes known beforehand, errors within their bounds for any finite input, and damage that never reaches a pool."""

from __future__ import annotations

import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpd.errors import ConfigError
from radixpd.kv.codec import HEADER_BYTES, build_codec, measure
from radixpd.kv.codec_choice import NAMES
from radixpd.kv.codec_grouped import group_channels
from radixpd.kv.layout import KVLayout
from radixpd.kv.pool import DTYPES

LOSSY = tuple(name for name in NAMES if name != "none")
TARGETS = {"fp8_e4m3": 0.50, "int8": 0.54, "int4": 0.32}
LEVELS = {"int8": (255, 254), "int4": (15, 15)}  # steps of K's and V's groups
SATURATED = 2.0**126


def layout(*, heads: int = 3, width: int = 64, page_size: int = 16, dtype: str = "float32") -> KVLayout:
    return KVLayout(layers=1, kv_heads=heads, head_dim=width, page_size=page_size, dtype=dtype)


def pages_of(shape: KVLayout, pages: int, seed: int = 0) -> torch.Tensor:
    """Numbers as keys and values have them: channels with their own mean and spread, tokens with their own size."""
    generator = torch.Generator().manual_seed(seed)
    size = (pages, 2, shape.page_size, shape.kv_heads, shape.head_dim)
    channel = torch.randn(1, 2, 1, *size[3:], generator=generator)
    token = torch.rand(*size[:3], 1, 1, generator=generator) + 0.1
    return (torch.randn(size, generator=generator) * token + 5 * channel).to(DTYPES[shape.dtype])


def encoded(name: str, shape: KVLayout, pages: torch.Tensor) -> torch.Tensor:
    codec = build_codec(name, shape)
    data = torch.empty(codec.encoded_bytes(len(pages)), dtype=torch.uint8)
    assert codec.encode_into(pages, data) == len(data)
    return data


def round_trip(name: str, shape: KVLayout, pages: torch.Tensor) -> torch.Tensor:
    layer = torch.full_like(pages, 7.0)
    build_codec(name, shape).decode_into(encoded(name, shape, pages), layer, torch.arange(len(pages)))
    return layer


def resealed(data: torch.Tensor) -> torch.Tensor:
    """The buffer with a checksum that fits what is in it: what a codec must refuse by itself."""
    raw = bytearray(data.numpy().tobytes())
    raw[8:12] = bytes(4)
    raw[8:12] = struct.pack("<I", zlib.crc32(raw))
    return torch.frombuffer(raw, dtype=torch.uint8)


def key_groups(x: torch.Tensor) -> list[torch.Tensor]:
    """K's groups, each [tokens, width], cut as the module says: whole pages, 32 tokens or more, the rest joins the last."""
    pages, page_size = len(x), x.shape[2]
    each = -(-32 // page_size)
    starts = [each * i for i in range(max(1, pages // each))]
    return [x[first:last, 0].flatten(0, 1).flatten(1) for first, last in zip(starts, [*starts[1:], pages])]


def bounds_slack(lo: torch.Tensor, hi: torch.Tensor, *, wide: bool) -> torch.Tensor:
    """Rounding of a stored bound (half a unit in the last place, of the larger), of the result's dtype aside."""
    largest = torch.maximum(lo.abs(), hi.abs())
    return largest * (2.0**-8 if wide else 2.0**-11) + (2.0**-25 if not wide else 2.0**-92)


def assert_within_bounds(name: str, pages: torch.Tensor, back: torch.Tensor) -> None:
    exact, got = pages.double().clamp(-SATURATED, SATURATED), back.double()
    wide = bool(exact.abs().max() > 65000)
    last_place = torch.finfo(pages.dtype).eps
    channels = group_channels(pages.shape[-1], 64 if name == "int8" else 32)
    values = [x.reshape(-1, channels).T for x in (exact[:, 1], got[:, 1])]
    groups = [(a, b, LEVELS[name][0], False) for a, b in zip(key_groups(exact), key_groups(got))]
    for want, have, levels, symmetric in [*groups, (*values, LEVELS[name][1], name == "int8")]:
        lo, hi = want.amin(0), want.amax(0)
        if symmetric:
            hi = torch.maximum(hi, -lo)
            lo = -hi
        slack = bounds_slack(lo, hi, wide=wide)
        allowed = (hi - lo + 2 * slack) / levels / 2 + slack + torch.maximum(lo.abs(), hi.abs()) * (last_place + 1e-5)
        assert bool(((want - have).abs() <= allowed).all()), f"off by {(want - have).abs().max()}, allowed {allowed.max()}"


# Sizes


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize(("heads", "width"), [(2, 64), (3, 64), (8, 64), (1, 128), (8, 128)])
@pytest.mark.parametrize("pages", [2, 3, 5, 128])
def test_sizes_stay_within_the_targets_scales_counted(name, heads, width, pages):
    shape = layout(heads=heads, width=width, dtype="bfloat16")
    size = build_codec(name, shape).encoded_bytes(pages)
    assert len(encoded(name, shape, pages_of(shape, pages))) == size
    share = (size - (HEADER_BYTES if name == "fp8_e4m3" else 0)) / (pages * shape.page_bytes)
    assert share <= TARGETS[name]


@pytest.mark.parametrize("name", NAMES)
def test_sizes_do_not_depend_on_content_nor_bytes_on_the_run(name):
    shape = layout()
    pages = pages_of(shape, 5)
    assert torch.equal(encoded(name, shape, pages), encoded(name, shape, pages.clone()))
    assert len(encoded(name, shape, torch.zeros_like(pages))) == len(encoded(name, shape, pages * 1e9))


@pytest.mark.parametrize(
    ("width", "eight", "four"),
    [(64, 64, 32), (128, 64, 32), (96, 48, 32), (80, 40, 40), (72, 36, 36), (16, 16, 16), (134, 134, 134)],
)
def test_value_groups_divide_a_head(width, eight, four):
    assert (group_channels(width, 64), group_channels(width, 32)) == (eight, four)


# Round trips


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pages", [1, 3])
def test_none_is_the_identity(dtype, pages):
    shape = layout(dtype=dtype)
    x = pages_of(shape, pages)
    assert torch.equal(encoded("none", shape, x), x.view(torch.uint8).flatten())
    assert torch.equal(round_trip("none", shape, x), x)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "width", "page_size"), [(3, 64, 16), (2, 128, 1), (1, 16, 24), (2, 80, 64), (1, 2, 7)])
@pytest.mark.parametrize("pages", [1, 2, 33, 67])
def test_integers_err_by_half_a_step(name, dtype, heads, width, page_size, pages):
    shape = layout(heads=heads, width=width, page_size=page_size, dtype=dtype)
    x = pages_of(shape, pages)
    assert_within_bounds(name, x, round_trip(name, shape, x))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_send_of_many_chunks_decodes_as_its_parts_do(name):
    shape = layout(heads=8, width=128)  # 2**18 values are 256 tokens
    x = pages_of(shape, 53)
    back = round_trip(name, shape, x)
    assert_within_bounds(name, x, back)
    assert torch.equal(back[:32], round_trip(name, shape, x[:32]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_fp8_is_the_nearest_e4m3_and_saturates(dtype):
    shape = layout(dtype=dtype)
    x = pages_of(shape, 45).float().mul(100)
    x[0, 0, 0, 0, :6] = torch.tensor([0.0, 2.0**-9, 2.0**-10, 448.0, 470.0, -1e4])
    x = x.to(DTYPES[dtype])
    expected = x.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)
    assert torch.equal(round_trip("fp8_e4m3", shape, x), expected)


def test_every_fp8_code_decodes_as_torch_says():
    shape = layout(heads=1, width=16, page_size=8)
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[127, 255]] = 0
    x = codes.view(torch.float8_e4m3fn).float().view(1, 2, 8, 1, 16)
    assert torch.equal(round_trip("fp8_e4m3", shape, x), x)


NUMBERS = {
    "float32": st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.floats(-20, 20, width=32),
        st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 2.0**-24, 65504.0, 65519.0, 65520.0, 3.4e38, -3.4e38, 2.0**126]),
    ),
    "bfloat16": st.one_of(st.floats(-20, 20, width=16), st.sampled_from([0.0, 9e-41, 1e30, -3.38e38, 65280.0, 65536.0])),
    "float16": st.one_of(st.floats(width=16, allow_nan=False, allow_infinity=False), st.sampled_from([6e-8, 65504.0, -65504.0])),
}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_finite_numbers_come_back_within_bounds(data):
    dtype = data.draw(st.sampled_from(sorted(NUMBERS)))
    shape = layout(heads=1, width=32, page_size=data.draw(st.sampled_from([1, 16, 20])), dtype=dtype)
    count = data.draw(st.integers(1, 5))
    few = data.draw(st.lists(NUMBERS[dtype], min_size=1, max_size=12))
    size = (count, 2, shape.page_size, 1, 32)
    pick = torch.randint(len(few), size, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 2**32))))
    x = torch.tensor(few).to(DTYPES[dtype])[pick]
    for name in ("int8", "int4"):
        back = round_trip(name, shape, x)
        assert bool(back.isfinite().all())
        assert_within_bounds(name, x, back)
    expected = x.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)
    assert torch.equal(round_trip("fp8_e4m3", shape, x), expected)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_not_finite_becomes_finite_and_leaves_other_groups_alone(name, dtype):
    shape = layout(dtype=dtype)
    clean = pages_of(shape, 4)
    x = clean.clone()
    x[0, 0, 3, 1, 5], x[0, 0, 4, 1, 6], x[0, 1, 3, 1, 5] = float("nan"), float("inf"), float("-inf")
    back = round_trip(name, shape, x)
    assert bool(back.isfinite().all())
    assert float((back[2:, 0] - clean[2:, 0]).abs().max()) < 2.0
    all_broken = round_trip(name, shape, torch.full_like(x, float("nan")))
    assert not all_broken.any()
    assert bool(round_trip(name, shape, torch.full_like(x, float("inf"))).isfinite().all())


@pytest.mark.parametrize("name", NAMES)
def test_only_the_named_pages_are_written_and_in_their_order(name):
    shape = layout()
    x = pages_of(shape, 3)
    layer = torch.full((8, *x.shape[1:]), 7.0)
    build_codec(name, shape).decode_into(encoded(name, shape, x), layer, torch.tensor([6, 1, 4]))
    assert torch.equal(layer[[6, 1, 4]], round_trip(name, shape, x))
    assert bool((layer[[0, 2, 3, 5, 7]] == 7.0).all())


@pytest.mark.parametrize("name", NAMES)
def test_buffers_may_start_at_odd_addresses_and_nothing_beyond_them_is_written(name):
    shape = layout()
    x = pages_of(shape, 3)
    data = encoded(name, shape, x)
    staging = torch.full((len(data) + 40,), 0xAB, dtype=torch.uint8)
    assert build_codec(name, shape).encode_into(x, staging[13:]) == len(data)
    assert torch.equal(staging[13 : 13 + len(data)], data)
    assert bool((staging[:13] == 0xAB).all() and (staging[13 + len(data) :] == 0xAB).all())
    layer = torch.zeros_like(x)
    build_codec(name, shape).decode_into(staging[13 : 13 + len(data)], layer, torch.arange(3))
    assert torch.equal(layer, round_trip(name, shape, x))


# Damage


def refused(name: str, shape: KVLayout, data: torch.Tensor, pages: int) -> None:
    layer = torch.full((pages, 2, shape.page_size, shape.kv_heads, shape.head_dim), 7.0, dtype=DTYPES[shape.dtype])
    with pytest.raises(ValueError):
        build_codec(name, shape).decode_into(data, layer, torch.arange(pages))
    assert bool((layer == 7.0).all()), "a refused buffer was written to the pool"


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(LOSSY), at=st.integers(0, 2**20), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(name, at, bit):
    shape = layout(heads=1, width=32)
    data = encoded(name, shape, pages_of(shape, 3))
    data[at % len(data)] ^= 1 << bit
    refused(name, shape, data, 3)


@pytest.mark.parametrize("name", NAMES)
def test_buffers_of_another_length_are_refused(name):
    shape = layout()
    data = encoded(name, shape, pages_of(shape, 3))
    for wrong in (data[:-1], data[:0], data[: HEADER_BYTES - 1], torch.cat((data, data[:1])), data.view(torch.int8), data[None]):
        refused(name, shape, wrong, 3)
    refused(name, shape, data, 2)
    refused(name, shape, data, 4)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(LOSSY), body=st.binary(min_size=1, max_size=64), flags=st.integers(0, 255), seal=st.booleans())
def test_made_up_bodies_are_refused_or_decode_to_finite_numbers(name, body, flags, seal):
    shape = layout(heads=1, width=32, dtype="float16")
    data = encoded(name, shape, pages_of(shape, 3))
    filler = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    data[HEADER_BYTES:] = filler.repeat(-(-len(data) // len(filler)))[: len(data) - HEADER_BYTES]
    data[3] = flags
    data = resealed(data) if seal else data
    layer = torch.full((3, 2, 16, 1, 32), 7.0, dtype=torch.float16)
    try:
        build_codec(name, shape).decode_into(data, layer, torch.arange(3))
    except ValueError:
        assert bool((layer == 7.0).all())
    else:
        assert seal
        assert bool(layer.isfinite().all())


def test_a_buffer_of_another_codec_is_refused():
    # One byte a value and no bounds to speak of: only the header tells these two apart.
    shape = layout(heads=1, width=32)
    data = encoded("int8", shape, pages_of(shape, 3))
    data[2] = 3
    refused("int8", shape, resealed(data), 3)


@pytest.mark.parametrize(
    ("name", "dtype", "at", "byte"),
    [
        ("fp8_e4m3", "float32", 700, 0x7F),  # NaN
        ("fp8_e4m3", "float32", -1, 0xFF),
        ("int8", "float32", 1, 0x7E),  # a lower key bound above the upper one
        ("int8", "float32", 1, 0x7C),  # infinity
        ("int8", "float32", -1, 0x80),  # code -128 of a symmetric group
        ("int4", "float32", 1, 0x7F),  # NaN
    ],
)
def test_bytes_that_no_encoder_writes_are_refused_even_under_a_right_checksum(name, dtype, at, byte):
    shape = layout(dtype=dtype)
    data = encoded(name, shape, pages_of(shape, 3))
    data[HEADER_BYTES + at if at >= 0 else at] = byte
    refused(name, shape, resealed(data), 3)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_channels_of_one_huge_constant_beside_zeros(name):
    # One step of such a group is 0, and its inverse times the constant no longer a number: neighbours share a byte with it.
    shape = layout(heads=1, width=32, page_size=1)
    x = torch.zeros(3, 2, 1, 1, 32)
    x[..., 6], x[..., 22] = 2.0**28, 2.0**100
    back = round_trip(name, shape, x)
    assert torch.equal(back[:, 0], x[:, 0])
    assert_within_bounds(name, x, back)


@pytest.mark.parametrize("name", NAMES)
def test_callers_mistakes_are_value_errors(name):
    shape = layout()
    x = pages_of(shape, 3)
    codec, data, layer = build_codec(name, shape), encoded(name, shape, x), torch.zeros(5, *x.shape[1:])
    for ids in ([0, 1, 5], [0, 1, -1], []):
        with pytest.raises(ValueError):
            codec.decode_into(data, layer, torch.tensor(ids, dtype=torch.int64))
    with pytest.raises(ValueError):
        codec.decode_into(data, layer, torch.tensor([0, 1, 2], dtype=torch.int32))
    with pytest.raises(ValueError):
        codec.decode_into(data, layer.bfloat16(), torch.arange(3))
    assert not layer.any()
    for wrong in (x[:0], x[:, :1], x.bfloat16(), x[..., :32]):
        with pytest.raises(ValueError):
            codec.encode_into(wrong, data)
    for out in (data[:-1], data.view(torch.int8), data.repeat(2)[::2]):
        with pytest.raises(ValueError):
            codec.encode_into(x, out)


def test_a_name_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match="none, fp8_e4m3, int8, int4"):
        build_codec("fp4", layout())


def test_an_odd_token_cannot_be_packed_two_to_a_byte():
    with pytest.raises(ConfigError, match="3 values"):
        build_codec("int4", layout(heads=1, width=3))


@pytest.mark.parametrize("name", NAMES)
def test_measured_speeds_name_the_codec_and_its_size(name):
    shape = layout(dtype="bfloat16")
    speed = measure(build_codec(name, shape), shape, pages=4, repeats=1)
    assert speed.name == name
    assert speed.encode > 0 < speed.decode
    assert speed.ratio == build_codec(name, shape).encoded_bytes(4) / (4 * shape.page_bytes)


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_next_tokens_of_the_demo_model_hardly_change():
    from benchmark.bench_codec import TARGETS as GOALS
    from benchmark.bench_codec import quality

    for row in quality(list(GOALS)):
        assert row.positions >= 2000
        assert 0 < row.mean <= GOALS[row.name][1], row
