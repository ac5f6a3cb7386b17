"""Operating a real server: stacks and dumps when it fails, profiles, logs that change while it runs, names that people can find.

The rules are tested in test/runtime with small parts; here they are seen to work together in the real processes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.processes import run_to_end, session_members
from e2e.servers import Server, free_port, until

SMALL = ("--max-total-tokens", "4096", "--threads", "1")
PROCESSES = ("api", "scheduler", "runner")
ADMIN, SALT = "sk-admin-secret", "salt-secret"
LONG = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 3500}


@pytest.fixture
def start(tiny: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Servers that a test may hurt, with a folder for dumps and one for profiles."""
    servers: list[Server] = []

    def launch(*flags: str) -> Server:
        folders = ("--crash-dump-folder", str(tmp_path / "crashes"), "--profile-folder", str(tmp_path / "profiles"))
        servers.append(Server(tiny, *SMALL, *folders, *flags))
        return servers[-1]

    yield launch
    for server in servers:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `gentle` writes."""
    return tmp_path_factory.mktemp("gentle")


@pytest.fixture(scope="module")
def gentle(tiny: Path, folder: Path) -> Iterator[Server]:
    """A server with folders that nobody hurts. It leaves no dump: nothing failed."""
    server = Server(tiny, *SMALL, "--crash-dump-folder", str(folder / "crashes"), "--profile-folder", str(folder / "profiles"))
    yield server
    assert server.close() == 0
    assert list((folder / "crashes").iterdir()) == []


def crash(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Head and requests of the one dump in a folder."""
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    head, *requests = [json.loads(line) for line in file.read_text().splitlines()]
    return head, requests


@pytest.mark.parametrize("victim", [pytest.param("scheduler", marks=pytest.mark.full), "runner", "api"])
def test_a_process_that_stands_still_ends_the_server_with_every_stack_and_a_dump(
    start: Callable[..., Server], tmp_path: Path, victim: str
) -> None:
    server = start("--watchdog-timeout", "6")
    server.generate(text="before", cache_salt=SALT, sampling_params={"max_new_tokens": 2, "ignore_eos": True})
    server.generate(text="secret", no_logs=True, rid="unseen", sampling_params={"max_new_tokens": 2, "ignore_eos": True})
    pids = server.children()
    stream = server.stream("/generate", {"text": "hurt", "rid": "hurt", "sampling_params": LONG})
    first = next(stream)
    # So that it stays open, however fast the others go on.
    assert server.post("/pause_generation", {"mode": "in_place"}).status == 200
    os.kill(pids[victim], signal.SIGSTOP)
    *_, last = stream
    message = f"the {victim} process has not answered for 6 s (--watchdog-timeout)"
    assert last["error"]["message"] == message
    assert server.process.wait(15) == 1
    until(lambda: not session_members(server.process.pid), "no process is left", seconds=5)
    log = server.log
    assert f"{message}; ending the server" in log
    for name in PROCESSES:
        state = "stopped" if name == victim else r"\w+"
        assert re.search(rf"stack of the {name} process \(pid {pids[name]}, {state} when asked\):\n.*most recent call first", log)
    for file in ("server/process.py", "runtime/scheduler_process.py", "runtime/runner_process.py"):
        assert f"radixpd/{file}" in log
    head, requests = crash(tmp_path / "crashes")
    assert (head["reason"], head["settings"]["max_total_num_tokens"]) == (message, 4096)
    before, hurt = requests
    assert (before["open"], before["salted"], len(before["output_ids"])) == (False, True, 2)
    assert (hurt["rid"], hurt["open"], hurt["sampling_params"]["max_new_tokens"]) == ("hurt", True, 3500)
    assert hurt["output_ids"][: len(first["output_ids"])] == first["output_ids"]
    assert f"crash dump: {tmp_path}/crashes/radixpd-crash-" in log


def test_a_killed_runner_leaves_a_dump_without_keys_and_salts(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start("--api-key", ADMIN, "--log-requests", "--log-requests-level", "3", "--log-level", "debug", "--log-format", "json")
    good = {"Authorization": f"Bearer {ADMIN}"}
    body = {"text": "a", "cache_salt": SALT, "extra_key": SALT, "sampling_params": {"max_new_tokens": 2}}
    assert server.post("/generate", body, headers=good).status == 200
    assert server.post("/generate", body).status == 401
    os.kill(server.children()["runner"], signal.SIGKILL)
    assert server.process.wait(15) == 1
    head, (request,) = crash(tmp_path / "crashes")
    assert head["reason"] == "the runner process was killed by signal 9 (Killed)"
    assert request["salted"]
    (file,) = (tmp_path / "crashes").iterdir()
    for text in (file.read_text(), server.log):
        assert ADMIN not in text
        assert SALT not in text
    lines = [json.loads(line) for line in server.log.splitlines()]  # every line is an object
    assert {line["process"] for line in lines} == {"supervisor", *PROCESSES}
    events = [line for line in lines if line["message"].startswith("request.")]
    assert [event["message"] for event in events] == ["request.received", "request.finished", "request.refused"]
    assert events[2]["code"] == "invalid_api_key"


@pytest.mark.full
def test_the_soft_watchdog_shows_stacks_and_the_server_goes_on(start: Callable[..., Server]) -> None:
    server = start("--soft-watchdog-timeout", "5")
    scheduler = server.children()["scheduler"]
    os.kill(scheduler, signal.SIGSTOP)
    until(lambda: "stack of the runner process" in server.log and "stack of the api process" in server.log, "stacks in the log")
    assert "the scheduler process has not answered for 5 s (--soft-watchdog-timeout); stacks follow" in server.log
    os.kill(scheduler, signal.SIGCONT)
    until(lambda: "stack of the scheduler process" in server.log, "the stack of the one that stood still")
    assert server.generate(text="alive?", sampling_params={"max_new_tokens": 1})
    assert server.close() == 0


def test_sigusr2_to_any_process_shows_where_it_is(server: Server) -> None:
    seen = len(server.log)
    for name, pid in server.children().items():
        os.kill(pid, signal.SIGUSR2)
        until(lambda name=name, pid=pid: f"stack of the {name} process (pid {pid})" in server.log[seen:], f"the stack of {name}")
    os.kill(server.process.pid, signal.SIGUSR2)
    until(lambda: "process_group.py" in server.log[seen:], "the supervisor's stack")
    assert server.get("/health").status == 200


def test_processes_have_names_that_people_can_find(server: Server) -> None:
    pids = {"supervisor": server.process.pid, **server.children()}
    names = {name: Path(f"/proc/{pid}/comm").read_text().strip() for name, pid in pids.items()}
    assert names == {"supervisor": "radixpd", "api": "radixpd-api", "scheduler": "radixpd-schedul", "runner": "radixpd-runner"}


def test_py_spy_sees_into_every_process(server: Server) -> None:
    command = str(Path(sys.executable).parent / "py-spy")
    functions = {"api": "body", "scheduler": "_wait", "runner": "_run_steps"}
    for name, pid in server.children().items():
        done = subprocess.run([command, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode and ("Permission" in done.stderr or "ptrace" in done.stderr):
            pytest.skip("this machine does not let processes be traced")
        assert functions[name] in done.stdout, done.stderr


def test_se_10_a_body_cannot_choose_where_a_profile_goes(gentle: Server, folder: Path) -> None:
    for path in ("../", str(folder), "/tmp/x", "profiles/../.."):
        answer = gentle.post("/start_profile", {"output_dir": path, "num_steps": 1})
        assert (answer.status, answer.json["error"]["param"]) == (400, "output_dir")
    gentle.generate(text="a", sampling_params={"max_new_tokens": 3})
    assert sorted(path.name for path in folder.iterdir()) == ["crashes", "profiles"]
    assert list((folder / "profiles").iterdir()) == []


def test_a_profile_is_written_into_its_folder_while_requests_run(gentle: Server, folder: Path) -> None:
    server = gentle
    stream = server.stream("/generate", {"text": "profiled", "sampling_params": {**LONG, "max_new_tokens": 600}})
    next(stream)
    assert server.post("/start_profile", {"num_steps": 10}).json == {"num_steps": 10}
    events = list(stream)
    assert len(events[-1]["output_ids"]) == 600  # serving went on
    answer = server.post("/stop_profile")
    assert answer.status == 200, answer.body
    (file,) = (folder / "profiles").iterdir()
    assert answer.json == {"path": str(file)}
    assert file.stat().st_mode & 0o777 == 0o600
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert any(str(name).startswith("aten::") for name in names)
    assert server.post("/stop_profile").status == 400


def test_without_a_folder_profiles_are_refused(server: Server) -> None:
    answer = server.post("/start_profile", {})
    assert answer.status == 400
    assert "--profile-folder" in answer.json["error"]["message"]


def test_the_log_level_changes_in_every_process(gentle: Server) -> None:
    server = gentle
    for level, silent in (("error", True), ("info", False)):
        assert server.post("/configure_logging", {"log_level": level, "log_requests": True}).json["log_level"] == level
        seen = len(server.log)
        server.generate(text=f"at {level}", rid=level, sampling_params={"max_new_tokens": 1})
        until(lambda level=level, seen=seen: f"request.finished rid={level}" in server.log[seen:], "the request log, whatever the level")
        assert ("Prefill batch" not in server.log[seen:]) == silent
    assert set(server.post("/freeze_gc").json) == set(PROCESSES)
    assert server.generate(text="alive?", sampling_params={"max_new_tokens": 1})


@pytest.mark.parametrize("flag", ["--crash-dump-folder", "--profile-folder"])
def test_op_05_a_folder_that_cannot_be_written_is_one_line(tiny: Path, flag: str) -> None:
    ended = run_to_end("--model-path", str(tiny), "--port", str(free_port()), *SMALL, flag, "/proc/nowhere")
    assert ended.code == 2
    assert flag in ended.error
    assert ended.left == {}
