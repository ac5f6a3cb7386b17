"""The request log: one line for each request, without what nobody may read, whatever the disk does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from mini_lb.lb_stubs import event, stream, until

from radixpd.errors import ConfigError
from radixpd.mini_lb import request_log
from radixpd.mini_lb.request_log import RequestLog

USAGE = {"text": "x", "meta_info": {"prompt_tokens": 40, "completion_tokens": 7, "cached_tokens": 16}}
DONE = b"data: [DONE]\n\n"


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_each_request_is_one_line_without_secrets(stubs, balance, tmp_path) -> None:
    async def script(request, visit):
        return await stream(request, event(USAGE), DONE)

    (worker,) = await stubs("a", script=script)
    path = tmp_path / "requests.jsonl"
    lb = await balance("--worker-urls", worker.url, "--request-log", str(path), "--api-key", "key-of-ada", "--policy", "kv_cost")
    await lb.up(1)
    key = {"Authorization": "Bearer key-of-ada"}
    body = {"text": "a secret of Ada's", "stream": True}
    await lb.events(body=body, headers={**key, "X-Request-Id": "one"})
    await lb.post(body=body, status=401, headers={"X-Request-Id": "two", "Authorization": "Bearer key-of-eve"})
    async with lb.http.post("/made/up?text=a+secret", headers=key) as response:
        assert response.status == 404
    async with lb.http.post("/flush_cache", headers=key) as response:
        assert response.status == 200
    for route in ("/health", "/metrics", "/workers"):
        await (await lb.http.get(route, headers=key)).release()
    found = await until(lambda: len(lines(path)) >= 4 and lines(path), "all are there")
    assert [(each["method"], each["route"], each["status"]) for each in found] == [
        ("POST", "/generate", 200), ("POST", "/generate", 401), ("other", "other", 404), ("POST", "/flush_cache", 200),
    ]  # fmt: skip
    first = found[0]
    assert {name: first[name] for name in first if not name.endswith(("_s", "time"))} == {
        "rid": "one", "method": "POST", "route": "/generate", "status": 200, "outcome": "ok", "stream": True, "prompt_tokens": 40,
        "cached_tokens": 16, "output_tokens": 7, "tries": 1, "worker": worker.url, "decode": None, "expected_hit_tokens": 0,
        "reason": "lowest estimate, nothing cached",
    }  # fmt: skip
    assert 0 < first["ttft_s"] <= first["duration_s"]
    assert first["estimated_ttft_s"] > 0
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first["time"])
    assert found[1]["rid"] == "two"
    assert not re.search("secret|key-of", path.read_text())


async def test_a_refused_request_has_a_line_too(stubs, balance, tmp_path) -> None:
    path = tmp_path / "log"
    lb = await balance("--worker-urls", "http://127.0.0.1:9", "--request-log", str(path))
    await lb.post(status=503)
    (found,) = await until(lambda: lines(path), "it is there")
    assert (found["status"], found["outcome"], found["tries"], found["error"]) == (503, "refused", 0, "no worker is available")


async def test_a_full_disk_costs_lines_and_no_request(stubs, balance, caplog) -> None:
    (worker,) = await stubs("a")
    lb = await balance("--worker-urls", worker.url, "--request-log", "/dev/full")
    await lb.up(1)
    for _ in range(3):
        await lb.post()
    await until(lambda: lb.parts.request_log.lost == 3, "they are lost")
    assert await lb.metric("request_log_lost_total") == 3
    assert "the request log has lost" in caplog.text
    assert caplog.text.count("No space left") == 1  # not once for each


def test_a_file_that_was_moved_away_is_left_alone(tmp_path) -> None:
    path, old = tmp_path / "log", tmp_path / "log.1"
    log = RequestLog(str(path))
    log.write({"n": 1})
    path.rename(old)
    log.write({"n": 2})
    log.reopen()
    log.write({"n": 3})
    log.close()
    assert [each["n"] for each in lines(old)] == [1, 2]
    assert lines(path) == [{"n": 3}]


def test_a_file_that_is_there_grows(tmp_path) -> None:
    for number in range(2):
        log = RequestLog(str(tmp_path / "log"))
        log.write({"n": number})
        log.close()
    assert lines(tmp_path / "log") == [{"n": 0}, {"n": 1}]


async def test_half_a_line_does_not_spoil_the_next(tmp_path, monkeypatch) -> None:
    """A disk that fills up in the middle of a line."""

    class Full:
        def write(self, data: memoryview) -> int:
            if self.taken:
                raise OSError(28, "No space left on device")
            self.taken = bytes(data[:9])
            return 9

        def close(self) -> None:
            real.write(self.taken)

        taken = b""

    path = tmp_path / "log"
    real = path.open("ab", buffering=0)
    files = [Full(), real]
    monkeypatch.setattr(request_log, "_open", lambda path: files.pop(0))
    log = RequestLog(str(path))
    log.write({"number": 1})
    await until(lambda: log.lost, "the disk is full")
    log.write({"number": 2})
    log.close()
    assert path.read_text() == '{"number"\n{"number":2}\n'
    assert log.lost == 1


def test_lines_wait_for_the_disk_within_bounds(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(request_log, "MOST_LINES", 10)
    log = RequestLog(str(tmp_path / "log"))
    log.close()  # the thread takes no more
    for number in range(25):
        log.write({"n": number})
    assert log.lost == 15


def test_a_file_that_cannot_be_opened_ends_the_start(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"--request-log /nowhere/log: No such file or directory"):
        RequestLog("/nowhere/log")


def test_without_a_path_there_is_none() -> None:
    log = RequestLog(None)
    assert not log.enabled
    log.reopen()
    log.close()
