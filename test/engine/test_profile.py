"""Profiles of a runner: bounded, one at a time, into the folder of the settings and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from radixpd.engine.profile import Profiler
from radixpd.errors import BadRequest


def step(profiler: Profiler) -> None:
    torch.ones(4) @ torch.ones(4)
    profiler.stepped()


def test_a_profile_ends_by_itself_after_its_steps_and_is_private(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path), rank=0)
    profiler.start(steps=2, record_shapes=False, with_stack=False)
    with pytest.raises(BadRequest, match="a profile is running"):
        profiler.start(steps=2, record_shapes=False, with_stack=False)
    step(profiler)
    assert list(tmp_path.iterdir()) == []
    step(profiler)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert sum(event.get("name") == "aten::dot" for event in json.loads(file.read_text())["traceEvents"]) == 2
    step(profiler)  # not recorded any more
    assert profiler.stop() == str(file)
    with pytest.raises(BadRequest, match="no profile was started"):
        profiler.stop()
    profiler.start(steps=100, record_shapes=True, with_stack=True)
    step(profiler)
    assert {file, Path(profiler.stop())} == set(tmp_path.iterdir())


def test_without_a_folder_every_profile_is_refused() -> None:
    profiler = Profiler(None, rank=0)
    with pytest.raises(BadRequest, match="--profile-folder"):
        profiler.start(steps=1, record_shapes=False, with_stack=False)
    step(profiler)
    with pytest.raises(BadRequest, match="no profile was started"):
        profiler.stop()


def test_a_folder_that_has_gone_ends_the_profile_not_the_runner(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path / "gone"), rank=0)
    profiler.start(steps=1, record_shapes=False, with_stack=False)
    step(profiler)
    with pytest.raises(BadRequest, match="no profile"):
        profiler.stop()
    step(profiler)
