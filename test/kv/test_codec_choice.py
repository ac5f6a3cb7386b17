"""Which codec a send takes: the flag's values, and the choice by measured speeds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixpd.errors import ConfigError
from radixpd.kv.codec_choice import NAMES, Chooser, Speed, carriers, choose, listed, seconds

GIGA = 1e9
NONE = Speed("none", encode=20 * GIGA, decode=20 * GIGA, ratio=1.0)
FP8 = Speed("fp8_e4m3", encode=2 * GIGA, decode=3 * GIGA, ratio=0.5)
INT8 = Speed("int8", encode=2 * GIGA, decode=3 * GIGA, ratio=0.54)
INT4 = Speed("int4", encode=1.5 * GIGA, decode=2 * GIGA, ratio=0.3125)
ALL = (NONE, FP8, INT8, INT4)


@pytest.mark.parametrize(
    ("link", "name"),
    [(0.1, "int4"), (0.4, "int4"), (0.8, "fp8_e4m3"), (0.9, "fp8_e4m3"), (2.5, "none"), (10.0, "none"), (math.inf, "none")],
)
def test_slow_links_take_the_smallest_and_fast_ones_the_quickest(link, name):
    assert choose(ALL, 1e8, link * GIGA) == name


def test_stages_overlap_so_the_slowest_alone_counts():
    assert seconds(INT4, 3e9, 0.5 * GIGA) == pytest.approx(2.0)  # encoding; the wire needs 1.875
    assert seconds(INT4, 3e9, 0.25 * GIGA) == pytest.approx(3.75)  # the wire
    assert seconds(Speed("int4", encode=2e9, decode=1e9, ratio=0.3125), 3e9, GIGA) == pytest.approx(3.0)  # decoding


def test_only_listed_codecs_are_chosen():
    assert choose((INT8, INT4), 1e8, 100 * GIGA) == "int8"
    assert choose((INT4,), 1e8, 100 * GIGA) == "int4"


def test_of_equals_the_less_lossy_wins_in_any_order():
    rough = Speed("int4", encode=2 * GIGA, decode=3 * GIGA, ratio=0.3125)
    assert choose((rough, INT8), 1e8, 50 * GIGA) == choose((INT8, rough), 1e8, 50 * GIGA) == "int8"
    assert choose(ALL, 0, GIGA) == "none"


@given(
    st.lists(st.builds(Speed, st.sampled_from(NAMES), *[st.floats(1e6, 1e11)] * 2, st.floats(0.1, 2)), min_size=1, max_size=4),
    st.floats(1, 1e12),
    st.floats(1e5, 1e12),
)
def test_nothing_listed_is_faster(speeds, raw, link):
    chosen = choose(speeds, raw, link)
    best = min(seconds(speed, raw, link) for speed in speeds)
    assert any(speed.name == chosen and seconds(speed, raw, link) == best for speed in speeds)


@pytest.mark.parametrize("link", [0, -1, math.nan])
def test_a_link_without_speed_is_a_mistake(link):
    with pytest.raises(ValueError, match="link"):
        choose(ALL, 1e8, link)
    with pytest.raises(ValueError, match="no codec"):
        choose((), 1e8, GIGA)


@pytest.mark.parametrize("field", ["encode", "decode", "ratio"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_speeds_are_above_zero(field, value):
    with pytest.raises(ValueError, match="int8"):
        Speed("int8", **{"encode": 1.0, "decode": 1.0, "ratio": 1.0, field: value})


@pytest.mark.parametrize(
    ("value", "names"),
    [("none", ("none",)), ("int4", ("int4",)), ("auto:none,int8", ("none", "int8")), ("auto: int4 , fp8_e4m3", ("int4", "fp8_e4m3"))],
)
def test_values_of_the_flag(value, names):
    assert listed(value) == names


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("auto", "auto:none,fp8_e4m3,int8,int4"),
        ("auto:", "empty name"),
        ("auto:int8,", "empty name"),
        ("fp4", "known: none"),
        ("int8,int4", "known"),
        ("auto:int8,fp4", "fp4"),
        ("auto:int8,int8", "twice"),
        ("", "empty name"),
    ],
)
def test_wrong_values_name_the_flag_and_what_is_wrong(value, told):
    with pytest.raises(ConfigError, match=r"--disaggregation-transfer-dtype") as caught:
        listed(value)
    assert told in str(caught.value)


def test_plain_pages_until_the_link_is_known_and_again_when_it_is_not():
    chooser = Chooser(ALL)
    assert chooser.pick(1e8, None) == "none"
    assert chooser.pick(1e8, 0.1 * GIGA) == "int4"
    assert chooser.pick(1e8, None) == "none"


def test_a_change_must_be_worth_it():
    chooser = Chooser((NONE, INT8))
    assert chooser.pick(1e8, 2.2 * GIGA) == "none"  # int8: 0.5 ns a byte against 0.4545
    assert chooser.pick(1e8, 1.7 * GIGA) == "none"  # 0.5 against 0.588: 85 % of it
    assert chooser.pick(1e8, 1.5 * GIGA) == "int8"  # 0.5 against 0.667: 75 %
    assert chooser.pick(1e8, 1.7 * GIGA) == "int8"
    assert chooser.pick(1e8, 2.4 * GIGA) == "int8"  # 0.4167 against 0.5: 83 %
    assert chooser.pick(1e8, 2.6 * GIGA) == "none"  # 0.3846: 77 %


def test_plain_pages_are_chosen_on_a_fast_link_whatever_is_listed():
    chooser = Chooser((NONE, INT4))
    assert chooser.pick(1e8, 0.1 * GIGA) == "int4"
    assert chooser.pick(1e8, 100 * GIGA) == "none"


@pytest.mark.parametrize(
    ("backend", "dtype", "names"),
    [
        ("auto", "none", ("shm", "tcp")),
        ("auto", "int8", ("tcp",)),
        ("auto", "auto:none,int8", ("tcp",)),
        ("shm", "none", ("shm",)),
        ("mooncake", "none", ("mooncake",)),
        ("tcp", "int4", ("tcp",)),
    ],
)
def test_transports_that_go_with_a_codec(backend, dtype, names):
    assert carriers(backend, dtype) == names


@pytest.mark.parametrize("backend", ["shm", "mooncake", "nixl"])
def test_a_codec_that_no_receiver_could_undo_is_refused_with_both_flags(backend):
    with pytest.raises(ConfigError) as caught:
        carriers(backend, "auto:int8")
    assert "--disaggregation-transfer-dtype auto:int8 needs --disaggregation-transfer-backend tcp" in str(caught.value)
    assert f"{backend} puts" in str(caught.value)
