"""The crash dump: the last minutes of requests in a private file, within bounds, without anything that must not be shown."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixpd.core.request import Finish, SamplingParams
from radixpd.runtime import crash_dump
from radixpd.runtime.crash_dump import Recorder

BROKEN = Finish("abort", message="the runner died", status=500)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`monotonic` is the test's; the time of day is 5,000 seconds more."""
    now = SimpleNamespace(value=1000.0)
    monkeypatch.setattr(crash_dump.time, "monotonic", lambda: now.value)
    monkeypatch.setattr(crash_dump.time, "time", lambda: now.value + 5000)
    return now


def output(rid: str, *, tokens: int = 4, finish: Finish | None = None, **changes: Any) -> Any:
    usual = {
        "rid": rid, "group": rid, "prompt": np.arange(tokens, dtype=np.int32), "ids": [7, 8], "cached": 1, "params": SamplingParams(seed=3),
        "priority": 2, "salted": True, "finish": finish or Finish("length"), "arrived": 990.0, "sent": 990.5, "queued": 1.0, "first": 992.0,
        "last": 993.0, "ended": 994.0,
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **changes})


def lines(path: str) -> list[Any]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_what_was_finished_and_what_was_open_is_written_with_the_reason(clock, tmp_path) -> None:
    recorder = Recorder(str(tmp_path), {"version": "1", "settings": {"api_key": "***"}})
    recorder.ended(output("done"))
    recorder.ended(output("open", finish=BROKEN, queued=None, first=0.0))
    path = recorder.dump("the runner died")
    head, done, still_open = lines(path)
    assert head == {
        "reason": "the runner died", "time": 6000.0, "requests": 2, "left_out": 0, "version": "1", "settings": {"api_key": "***"},
    }  # fmt: skip
    assert done["arrived"] == 5990.0
    assert done["seconds"] == {"tokenized": 0.5, "ended": 4.0, "planned": 1.0, "first_token": 2.0, "last_token": 3.0}
    assert (done["input_ids"], done["output_ids"], done["open"]) == ([0, 1, 2, 3], [7, 8], False)
    assert (done["sampling_params"]["seed"], done["salted"], done["priority"]) == (3, True, 2)
    assert (still_open["rid"], still_open["open"]) == ("open", True)
    assert still_open["seconds"] == {"tokenized": 0.5, "ended": 4.0}


def test_the_file_is_the_owners_alone_and_replaces_nothing(clock, tmp_path) -> None:
    recorder = Recorder(str(tmp_path), {})
    recorder.ended(output("a"))
    path = Path(recorder.dump("x"))
    assert path.parent == tmp_path
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    assert recorder.dump("y") == ""  # the same second, the same name
    assert path.read_bytes() == before


def test_a_link_that_somebody_put_there_is_not_followed(clock, tmp_path) -> None:
    recorder = Recorder(str(tmp_path / "folder"), {})
    recorder.ended(output("a"))
    (tmp_path / "folder").mkdir()
    name = Path(recorder.dump("x")).name
    (tmp_path / "folder" / name).unlink()
    (tmp_path / "folder" / name).symlink_to(tmp_path / "victim")
    assert recorder.dump("x") == ""
    assert not (tmp_path / "victim").exists()


def test_only_the_last_minutes_are_kept(clock, tmp_path) -> None:
    recorder = Recorder(str(tmp_path), {})
    recorder.ended(output("old"))
    clock.value += crash_dump.KEEP_SECONDS - 1
    recorder.ended(output("new"))
    clock.value += 2  # nothing has ended since: the old one goes all the same
    assert [line["rid"] for line in lines(recorder.dump("x"))[1:]] == ["new"]


def test_memory_is_bounded_and_the_latest_stay(clock, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(crash_dump, "KEEP_BYTES", 50 * (crash_dump.RECORD_BYTES + 4 * 102))
    recorder = Recorder(str(tmp_path), {})
    for index in range(200):
        recorder.ended(output(str(index), tokens=100))
    assert [line["rid"] for line in lines(recorder.dump("x"))[1:]] == [str(index) for index in range(150, 200)]


def test_the_file_is_bounded_and_says_what_it_left_out(clock, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(crash_dump, "FILE_BYTES", 10_000)
    recorder = Recorder(str(tmp_path), {})
    for index in range(200):
        recorder.ended(output(str(index), tokens=100))
    path = recorder.dump("x")
    head, *rest = lines(path)
    assert Path(path).stat().st_size < 11_000
    assert head["requests"] == len(rest)
    assert head["requests"] + head["left_out"] == 200
    assert [line["rid"] for line in rest] == [str(index) for index in range(200 - len(rest), 200)]


def test_without_requests_there_is_no_file(clock, tmp_path) -> None:
    assert Recorder(str(tmp_path), {}).dump("x") == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_has_gone_is_logged_not_raised(clock, tmp_path, caplog) -> None:
    recorder = Recorder(str(tmp_path / "gone"), {})
    recorder.ended(output("a"))
    assert recorder.dump("x") == ""
    assert "the crash dump could not be written" in caplog.text
