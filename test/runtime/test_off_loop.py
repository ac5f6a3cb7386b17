"""Work off the event loop: values, errors, deadlines, and threads that nobody waits for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from radixpd.runtime import off_loop
from radixpd.runtime.off_loop import Pace, in_thread


async def test_values_and_errors_come_back() -> None:
    assert await in_thread(lambda: threading.current_thread() is threading.main_thread(), seconds=10) is False
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 / 0, seconds=10)


async def test_the_deadline_holds_and_later_work_is_not_queued_behind() -> None:
    gate = threading.Event()
    stuck = [asyncio.create_task(in_thread(gate.wait, seconds=0.05)) for _ in range(40)]
    assert await in_thread(lambda: 7, seconds=10) == 7
    assert all(isinstance(each, TimeoutError) for each in await asyncio.gather(*stuck, return_exceptions=True))
    gate.set()


def test_a_thread_that_never_returns_does_not_hold_up_the_exit() -> None:
    program = """
import asyncio, threading
from radixpd.runtime.off_loop import in_thread
async def main():
    try:
        await in_thread(threading.Event().wait, seconds=0.05)
    except TimeoutError:
        print("late")
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.returncode) == ("late\n", 0)


async def test_a_long_loop_lets_others_run_only_when_its_time_is_over(monkeypatch) -> None:
    others = 0

    def other() -> None:
        nonlocal others
        others += 1

    pace, loop = Pace(), asyncio.get_running_loop()
    loop.call_soon(other)
    monkeypatch.setattr(off_loop, "SLICE", 1e9)
    await pace.breathe()
    assert others == 0
    monkeypatch.setattr(off_loop, "SLICE", -1)
    await pace.breathe()
    assert others == 1
