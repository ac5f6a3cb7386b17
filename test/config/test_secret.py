"""A secret leaves by `reveal` alone."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest

from radixpd.config.secret import Secret


@dataclasses.dataclass
class Holder:
    key: Secret


def test_nothing_prints_it() -> None:
    secret = Secret("hush")
    shown = [repr(secret), str(secret), f"{secret}", f"{secret!r:>9}", "%s" % secret, str([secret]), repr(Holder(secret))]  # noqa: UP031
    shown.append(str(dataclasses.asdict(Holder(secret))))
    assert not [text for text in shown if "hush" in text]
    with pytest.raises(TypeError):
        json.dumps(secret)


def test_it_compares_by_value() -> None:
    assert Secret("a") == Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a"), Secret("b")}) == 2
    assert copy.deepcopy(Secret("a")) == Secret("a")


def test_it_matches_text() -> None:
    assert Secret("schlüssel").matches("schlüssel")
    assert not Secret("a").matches("")
    assert not Secret("a").matches("a\udcff")
