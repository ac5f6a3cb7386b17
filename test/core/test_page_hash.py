"""Page hashes and namespaces: chained, framed, stable, and never equal for two different things."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from radixpd.core.page_hash import event_id, namespace, page_hashes, root_hash, token_bytes

ROOT = bytes(32)


def _chain(tokens: list[int], size: int = 4) -> list[bytes]:
    return page_hashes(ROOT, token_bytes(np.array(tokens)), 4 * size)


def test_token_bytes_are_little_endian_int32_of_any_array() -> None:
    expected = bytes([1, 0, 0, 0, 0, 2, 0, 0])
    for array in (np.array([1, 512]), np.array([1, 512], dtype=">i8"), np.array([1, 9, 512, 9], dtype=np.int32)[::2]):
        assert token_bytes(array) == expected


def test_one_hash_a_full_page_and_the_chain_by_hand() -> None:
    data = token_bytes(np.arange(10))
    first = hashlib.sha256(ROOT + data[:16]).digest()
    second = hashlib.sha256(first + data[16:32]).digest()
    assert page_hashes(ROOT, data, 16) == [first, second]


def test_a_hash_names_the_page_and_its_whole_prefix() -> None:
    one, other = _chain([1, 2, 3, 4, 5, 6, 7, 8]), _chain([9, 2, 3, 4, 5, 6, 7, 8])
    assert one[1] != other[1]
    assert _chain([1, 2, 3, 4, 9, 6, 7, 8])[0] == one[0]


def test_chaining_on_a_parent_equals_hashing_at_once() -> None:
    data = token_bytes(np.arange(16))
    whole = page_hashes(ROOT, data, 16)
    assert page_hashes(whole[1], data[32:], 16) == whole[2:]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": "bc"}, {"ab": "c"}),  # the border between tag and value
        ({"cache_salt": "x"}, {"adapter": "x"}),  # the tag counts
        ({"a": "b"}, {"b": "a"}),
        ({"a": "b", "c": "d"}, {"a": "bcd"}),  # joining imitates nothing
        ({"a": "b", "c": "d"}, {"a": "b\x00c\x00d"}),
        ({"a": ""}, {}),
        ({"a": "", "b": "x"}, {"a": "x", "b": ""}),
        ({"a": "\u00e9"}, {"a": "e\u0301"}),  # bytes, not looks
    ],
)
def test_namespaces_that_must_differ(one: dict[str, str], other: dict[str, str]) -> None:
    assert namespace(one) != namespace(other)


def test_namespace_does_not_depend_on_the_order_of_its_parts() -> None:
    assert namespace({"a": "1", "b": "2"}) == namespace({"b": "2", "a": "1"})


def test_no_parts_name_the_common_namespace() -> None:
    assert namespace({}) == b""
    assert len(namespace({"a": ""})) == 32


def test_root_hash_depends_on_model_and_namespace_with_a_frame() -> None:
    space = namespace({"cache_salt": "x"})
    assert len({root_hash("m", b""), root_hash("m", space), root_hash("n", space), root_hash("", b"m"), root_hash("mm", b"")}) == 5


def test_event_id_is_the_low_64_bits_unsigned() -> None:
    assert event_id(bytes(24) + bytes([0, 0, 0, 0, 0, 0, 1, 2])) == 258
    assert event_id(b"\xff" * 32) == 2**64 - 1
