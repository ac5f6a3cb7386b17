"""A program with an `LLM` in it, seen from outside: interrupted, killed, forked, its engine killed. Nothing may be left of it.

Each program is a plain script without a main guard, in a session and with a TMPDIR of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.processes import session_members
from e2e.servers import until

SECONDS = 60.0
FAILS_WITHIN = 10.0
MODULES = {
    "supervisor": "radixpd.runtime.embedded_supervisor",
    "scheduler": "radixpd.runtime.scheduler_process",
    "runner": "radixpd.runtime.runner_process",
}
HEAD = """
import asyncio, json, os, signal, sys, threading, time
from radixpd.errors import EngineFailed
from radixpd.llm import LLM

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests in the background has it ignored

def say(word):
    os.write(1, json.dumps(word).encode() + b"\\n")  # whole lines, whoever says them

def running():
    while not llm.get_server_info()["load"]["running"]:
        pass  # each turn asks the scheduler
    say("running")

SHORT = {"max_new_tokens": 3, "ignore_eos": True}
LONG = {"max_new_tokens": 3000, "ignore_eos": True}
def make():
    global llm
    llm = LLM(model_path=os.environ["MODEL"], max_total_tokens=4096, threads=1, watchdog_timeout=5)
"""


class Program:
    """A running script."""

    def __init__(self, code: str, path: Path, home: str, model: Path) -> None:
        path.write_text(HEAD + code)
        self.errors = path.with_suffix(".err")
        with self.errors.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True,
                env={**os.environ, "TMPDIR": home, "MODEL": str(model)},
            )  # fmt: skip
        self.words: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.words.put(line)
        self.words.put("")

    def hears(self) -> Any:
        """The next word that it says."""
        line = self.words.get(timeout=SECONDS)
        assert line, f"the program has ended:\n{self.errors.read_text()}"
        return json.loads(line)

    def engine(self) -> dict[str, int]:
        """Process ids by role."""
        members = session_members(self.process.pid)
        return {role: pid for role, module in MODULES.items() for pid, command in members.items() if f" -m {module} " in command}

    def end(self) -> tuple[int, str]:
        """Exit code and standard error."""
        return self.process.wait(SECONDS), self.errors.read_text()


Start = Callable[[str], Program]


@pytest.fixture
def home() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="e2e-") as directory:
        yield directory


@pytest.fixture
def start(tiny: Path, tmp_path: Path, home: str) -> Iterator[Start]:
    programs: list[Program] = []

    def run(code: str) -> Program:
        programs.append(Program(code, tmp_path / "script.py", home, tiny))
        return programs[-1]

    yield run
    for program in programs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.process.pid, signal.SIGKILL)
        program.process.wait(SECONDS)


def nothing_left(program: Program, home: str) -> bool:
    return not session_members(program.process.pid) and not os.listdir(home)


def test_ctrl_c_ends_the_call_and_the_program_goes_on(start: Start, home: str) -> None:
    program = start("""
make()
threading.Thread(target=running).start()
try:
    llm.generate(["a"] * 3000, LONG)
except KeyboardInterrupt:
    say("interrupted")
llm.flush_cache()
say(len(llm.generate("b", SHORT)["output_ids"]))
say([name for name in ("torch", "transformers") if name in sys.modules])
threading.Thread(target=lambda: llm.generate("c", LONG), daemon=True).start()
running()
sys.exit(7)
""")
    assert program.hears() == "running"
    os.killpg(program.process.pid, signal.SIGINT)
    assert program.hears() == "interrupted"
    assert program.hears() == 3
    assert program.hears() == []
    assert program.hears() == "running"
    code, err = program.end()
    assert code == 7
    assert "EngineFailed: this LLM has been shut down" in err  # what the daemon thread heard
    until(lambda: nothing_left(program, home), "no process, no directory")


@pytest.mark.full
def test_an_interruption_at_any_moment_leaves_nothing_running(start: Start, home: str) -> None:
    program = start("""
import random
make()
draw = random.Random(1)
def stream():
    for _ in llm.generate(["a b c"] * 5, {"max_new_tokens": 40}, stream=True): pass
def chat(): llm.chat([{"role": "user", "content": "x"}], {"max_new_tokens": 30})
def plain(): llm.generate(["a b c"] * 30, {"max_new_tokens": 40}, use_tqdm=False)
interrupted = 0
for round in range(120):
    timer = threading.Timer(draw.choice([0, 0.001, 0.01, 0.1]) * draw.random(), os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        (plain, stream, chat)[round % 3]()
        timer.join()
        time.sleep(1)  # the signal comes here
    except KeyboardInterrupt:
        interrupted += 1
    timer.join()
    llm.flush_cache()
say([interrupted, llm._runs._free._value == llm._runs.room])
say(len(llm.generate("a", SHORT)["output_ids"]))
""")
    assert program.hears() == [120, True]
    assert program.hears() == 3
    assert program.end()[0] == 0
    until(lambda: nothing_left(program, home), "no process, no directory")


def test_kill_9_of_the_program_leaves_nothing(start: Start, home: str) -> None:
    """Also when the thread that made the engine has ended, and a fork that outlives the program holds all its descriptors."""
    program = start("""
maker = threading.Thread(target=make)
maker.start()
maker.join()
threading.Thread(target=lambda: llm.generate(["a"] * 100, LONG), daemon=True).start()
running()
if os.fork() == 0:
    say(os.getpid())
    time.sleep(100)
time.sleep(100)
""")
    assert program.hears() == "running"
    fork = program.hears()
    assert set(program.engine()) == set(MODULES)
    os.kill(program.process.pid, signal.SIGKILL)
    until(lambda: set(session_members(program.process.pid)) == {fork}, "no process of the engine")
    until(lambda: not os.listdir(home), "no directory")


@pytest.mark.parametrize("victim", [*MODULES, pytest.param("stopped scheduler", marks=pytest.mark.full)])
def test_the_death_of_a_process_ends_every_call(start: Start, home: str, victim: str) -> None:
    program = start("""
make()
def plain(): llm.generate(["a"] * 3000, LONG, use_tqdm=False)
def stream(): list(llm.generate("a", LONG, stream=True))
def coroutine(): asyncio.run(llm.async_generate("a", LONG))
def heard(call):
    try:
        call()
        say("no error")
    except EngineFailed as error:
        say(str(error))
calls = [threading.Thread(target=heard, args=(call,)) for call in (plain, stream, coroutine)]
for call in calls: call.start()
running()
for call in calls: call.join()
for call in (plain, stream, coroutine, llm.flush_cache, llm.get_server_info, llm.abort_all, llm.pause_generation): heard(call)
""")
    assert program.hears() == "running"
    stopped = victim.startswith("stopped ")
    os.kill(program.engine()[victim.split()[-1]], signal.SIGSTOP if stopped else signal.SIGKILL)
    killed = time.monotonic()
    expected = (
        "the scheduler process has not answered for 5 s (--watchdog-timeout)"
        if stopped
        else f"the {victim} process was killed by signal 9 (Killed)"
    )
    first = program.hears()
    # Its children see the supervisor's end as soon as the program does, and may be the first to say so.
    assert first in ((expected, "the supervisor is gone") if victim == "supervisor" else (expected,))
    assert [program.hears() for _ in range(2)] == [first] * 2
    assert time.monotonic() - killed < FAILS_WITHIN
    assert [program.hears() for _ in range(7)] == [first] * 7
    assert program.end()[0] == 0
    until(lambda: nothing_left(program, home), "no process, no directory")


def test_a_fork_cannot_use_it_and_does_not_end_it(start: Start, home: str) -> None:
    program = start("""
make()
if os.fork() == 0:
    try:
        llm.generate("a", SHORT)
    except EngineFailed as error:
        say(str(error))
    llm.shutdown()
    sys.exit()  # runs what `atexit` knows
os.wait()
import multiprocessing
with multiprocessing.get_context("fork").Pool(1) as pool:
    say(pool.map(abs, [-1]))
say(len(llm.generate("a", SHORT)["output_ids"]))
del llm  # the last reference
say(os.listdir(os.environ["TMPDIR"]))
""")
    assert program.hears() == "this LLM belongs to the process that made it, not to a fork of it"
    assert program.hears() == [1]
    assert program.hears() == 3
    assert program.hears() == []
    assert program.end() == (0, "")
    assert nothing_left(program, home)
