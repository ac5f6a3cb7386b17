"""docs/offline.md tells the truth: its blocks are one program, which runs as it stands and prints what stands below each line.

With the tiny model only what does not depend on the model's mind is compared.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "offline.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def program() -> tuple[str, list[str]]:
    """The code, and the lines that it prints."""
    blocks = BLOCK.findall(DOCUMENT.read_text(encoding="utf-8"))
    assert len(blocks) >= 6
    code = "".join(blocks)
    return code, [line[4:] for line in code.splitlines() if line.startswith("# > ")]


def run(code: str, folder: Path) -> list[str]:
    """What the program prints."""
    script = folder / "program.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_program_runs_and_prints_a_line_for_each_that_is_promised(tiny: Path, tmp_path: Path) -> None:
    code, expected = program()
    code = code.replace('"demo"', f'"{tiny}", threads=1').replace("504, 3575", "50, 35").replace(", 282", "")
    # A text of the tiny model may hold line breaks.
    printed = run("import builtins\ndef print(*words): builtins.print(' '.join(map(str, words)).encode())\n" + code, tmp_path)
    assert len(printed) == len(expected)
    mindless = [(was, line) for was, line in zip(printed, expected, strict=True) if line.isdigit() or "temperature" in line]
    assert len(mindless) == 4
    assert all(was == f"{line.encode()}" for was, line in mindless)


@pytest.mark.full
def test_the_program_prints_what_is_promised(tmp_path: Path) -> None:
    code, expected = program()
    assert run(code, tmp_path) == expected
