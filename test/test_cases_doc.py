"""docs/cases.md and the tests agree: every case of a family has a row, and every test that a row names exists.

A row names its tests in backticks, or gives the reason why the case does not apply.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FAMILIES = {
    "ST": 12,
    "LP": 9,
    "SA": 7,
    "VA": 7,
    "AB": 5,
    "PC": 12,
    "IS": 6,
    "SC": 7,
    "CT": 5,
    "SE": 10,
    "OP": 7,
    "PD": 20,
    "RT": 15,
    "SO": 8,
    "TC": 6,
    "FE": 4,
}
ROW = re.compile(r"^\| ([A-Z]{2}-\d{2}) \| (.+?) \| (.+?) \|$", re.MULTILINE)
ROWS = {case: (behaviour, how) for case, behaviour, how in ROW.findall((ROOT / "docs" / "cases.md").read_text())}
TESTS = {name for file in (ROOT / "test").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}


def test_every_case_has_a_row() -> None:
    assert sorted(ROWS) == sorted(f"{family}-{number:02}" for family, last in FAMILIES.items() for number in range(1, last + 1))


@pytest.mark.parametrize("case", ROWS)
def test_the_tests_of_a_row_exist_and_carry_its_id(case: str) -> None:
    named = re.findall(r"`(test_\w+)`", ROWS[case][1])
    assert set(named) <= TESTS
    number = case.lower().replace("-", "_")
    assert all(number in name for name in named)
    assert named or len(ROWS[case][1]) > 20, "neither a test nor a reason"


def test_every_test_with_an_id_is_in_its_row() -> None:
    for name in TESTS:
        for family, number in re.findall(r"_([a-z]{2})_(\d{2})(?=_)", name):
            case = f"{family.upper()}-{number}"
            if case in ROWS:
                assert f"`{name}`" in ROWS[case][1], f"{name} is missing in the row of {case}"
