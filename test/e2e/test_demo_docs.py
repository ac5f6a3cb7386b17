"""README.md and docs/api.md tell the truth: every `curl` in them is run against the demo model and answers what is printed below it.

In the documents `...` stands for anything; ids and times of a run are not compared. Long answers may be broken into lines anywhere.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.servers import Server

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "docs/api.md")
BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
VARYING = re.compile(r"[0-9a-f]{32}|(?<=\"created\":)[0-9]+")


def examples(document: str) -> Iterator[tuple[str, str]]:
    """(command, expected output) of every curl."""
    for block in BLOCK.findall((ROOT / document).read_text(encoding="utf-8")):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            # A command goes on to the line that closes its quotes.
            lines = part.splitlines(keepends=True)
            end = next(
                (n for n in range(1, len(lines) + 1) if "".join(lines[:n]).count("'") % 2 == 0 and not lines[n - 1].endswith("\\\n")), 1
            )
            if part.startswith("curl "):
                yield "".join(lines[:end]), "".join(lines[end:])


def pattern(expected: str) -> str:
    """A regular expression for `expected`, to be matched against an answer without line breaks."""
    flat = VARYING.sub("...", "".join(expected.splitlines()))
    return ".*".join(re.escape(piece) for piece in flat.split("..."))


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    server = Server("demo", "--max-total-tokens", "16384")
    yield server
    assert server.close() == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "expected"), [pytest.param(*example, id=f"{name}-{n}") for name in DOCUMENTS for n, example in enumerate(examples(name))]
)
def test_an_example_answers_as_printed(command: str, expected: str, demo: Server) -> None:
    assert demo.post("/flush_cache").status == 200
    ours = command.replace("http://127.0.0.1:30000", "$B")
    done = subprocess.run(["bash", "-c", ours], env={**os.environ, "B": demo.url}, capture_output=True, text=True, timeout=120, check=True)
    assert re.fullmatch(pattern(expected), "".join(done.stdout.splitlines())), done.stdout


def test_there_are_examples() -> None:
    assert all(len(list(examples(name))) >= 1 for name in DOCUMENTS)
