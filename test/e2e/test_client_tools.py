"""The comparison behind the examples of docs/clients.md: strict about counts, indifferent to speeds and to what is left out."""

from __future__ import annotations

import pytest
from e2e.client_tools import comparable, examples, expected

SHOWN = """\
...
==== Result ====
Successful requests:     12
...
Mean TTFT (ms):          1109.42
Length │ 8.00 │
...
"""


def matches(printed: str) -> bool:
    return expected(SHOWN).match("".join(f"{line}\n" for line in comparable(printed))) is not None


@pytest.mark.parametrize(
    ("printed", "same"),
    [
        ("starting\n\n=== Result ===\nSuccessful requests: 12\nmore\nMean TTFT (ms): 3\nLength  │  8.00 │\nend\n", True),
        ("= Result =\nSuccessful requests: 12\nMean TTFT (ms): 3\nLength │ 8.00 │\n", True),
        ("= Result =\nSuccessful requests: 11\nMean TTFT (ms): 3\nLength │ 8.00 │\n", False),
        ("= Result =\nSuccessful requests: 12\nMean TTFT (ms): 3\nLength │ 7.96 │\n", False),
        ("= Result =\nSuccessful requests: 12\nMean TTFT (ms): 3\nother\nLength │ 8.00 │\n", False),
        ("= Result =\nfirst\nSuccessful requests: 12\nMean TTFT (ms): 3\nLength │ 8.00 │\n", False),
    ],
)
def test_counts_count_and_speeds_do_not(printed: str, same: bool) -> None:
    assert matches(printed) == same


def test_every_section_has_examples_with_output() -> None:
    for section in ("openai", "litellm", "langchain-openai", "lm-eval", "aiperf", "sglang", "guidellm", "instructor"):
        found = list(examples(section, url="http://127.0.0.1:1"))
        assert any(example.output for example in found), section
        assert not any("127.0.0.1:30000" in example.command[-1] for example in found), section
