"""Signs of life, as pipes and ticks: who counts as stuck, what is reported, which lines are a stack. No process is needed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from radixpd.runtime import watchdog
from radixpd.runtime.watchdog import BEAT, LEAST_TICKS, Pulse, Watchdog

STUCK = "the api process has not answered for 7 s (--watchdog-timeout)"


class Child:
    """A watched child that this test plays. Its process id is one that nobody has."""

    def __init__(self, dog: Watchdog, name: str = "api") -> None:
        self.dog = dog
        self.fd, self.end = dog.open()
        dog.watch(self.fd, name, 2**22 + 1)

    def says(self, text: str) -> str:
        os.write(self.end, text.encode())
        return self.dog.hear(self.fd)


@pytest.fixture
def dog() -> Iterator[Watchdog]:
    dog = Watchdog(7, 6)
    yield dog
    dog.close()


def test_silence_is_stuck_after_the_timeout_and_not_a_tick_before(dog: Watchdog) -> None:
    child = Child(dog)
    child.says("+\n.\n")
    assert [dog.tick() for _ in range(7)] == [""] * 6 + [STUCK]


def test_a_beat_starts_the_count_again(dog: Watchdog) -> None:
    child = Child(dog)
    child.says(".\n")
    for _ in range(5):
        assert [dog.tick() for _ in range(6)] == [""] * 6
        child.says(".\n")


def test_a_child_that_has_not_begun_to_beat_may_take_its_time(dog: Watchdog) -> None:
    Child(dog).says("+\n")
    assert not any(dog.tick() for _ in range(100))


def test_a_dump_is_no_sign_of_life_whatever_lines_it_has(dog: Watchdog) -> None:
    child = Child(dog)
    child.says(".\n")
    for _ in range(6):
        assert not dog.tick()
        child.says('Thread 0x1 (most recent call first):\n  File "a.py", line 1 in f\n\n')
    assert dog.tick() == STUCK


def test_a_report_names_who_is_stuck_also_when_it_comes_in_parts(dog: Watchdog) -> None:
    child = Child(dog, "scheduler")
    assert child.says(".\n!the runner pro") == ""
    assert child.says("cess has not answered\n.\n") == "the runner process has not answered"


def test_a_short_timeout_still_grants_a_busy_machine_some_ticks() -> None:
    dog = Watchdog(1)
    Child(dog).says(".\n")
    assert [bool(dog.tick()) for _ in range(LEAST_TICKS)] == [False] * (LEAST_TICKS - 1) + [True]
    dog.close()


def test_without_a_timeout_nobody_is_ever_stuck() -> None:
    dog = Watchdog()
    Child(dog).says(".\n")
    assert not any(dog.tick() for _ in range(1000))
    dog.close()


def test_the_soft_timeout_asks_for_stacks_once_per_silence_and_ends_nothing(monkeypatch, caplog) -> None:
    dog = Watchdog(None, 6)
    asked: list[bool] = []
    monkeypatch.setattr(dog, "dump", lambda *, wake=False: asked.append(wake) or "")
    child = Child(dog, "runner")
    for _ in range(2):
        child.says(".\n")
        assert not any(dog.tick() for _ in range(20))
    assert asked == [False, False]  # nobody is woken
    assert [record.getMessage() for record in caplog.records] == [
        "the runner process has not answered for 6 s (--soft-watchdog-timeout); stacks follow"
    ] * 2
    dog.close()


def test_only_children_that_can_dump_are_asked(monkeypatch) -> None:
    """SIGUSR2 before its handler is in place would kill them."""
    dog = Watchdog(7)
    ready, young = Child(dog, "runner"), Child(dog, "api")
    ready.says("+\n")
    young.says(".\n")
    killed: list[int] = []
    monkeypatch.setattr(watchdog.os, "kill", lambda pid, number: killed.append(number))
    dog.dump(wake=True)
    assert killed == [watchdog.signal.SIGUSR2, watchdog.signal.SIGCONT]
    monkeypatch.undo()
    dog.close()


def test_a_stack_is_one_log_message_with_the_name_of_its_process(dog: Watchdog, caplog) -> None:
    child = Child(dog, "runner")
    with caplog.at_level(logging.WARNING):
        child.says("+\nThread 0x1 (most recent call first):\n  File")
        dog.tick()
        assert not caplog.records  # more may come
        child.says(' "a.py", line 1 in f\n')
        dog.tick()
        dog.tick()
    (record,) = caplog.records
    assert record.getMessage() == (
        f'stack of the runner process (pid {2**22 + 1}):\nThread 0x1 (most recent call first):\n  File "a.py", line 1 in f'
    )


def test_the_last_words_of_a_child_that_has_gone_are_logged_and_its_pipe_is_closed(dog: Watchdog, caplog) -> None:
    child = Child(dog)
    os.write(child.end, b"Current thread\n")
    os.close(child.end)
    assert dog.hear(child.fd) == ""
    assert "Current thread" in caplog.text
    assert dog.descriptors == ()
    assert not dog.tick()


def test_noise_is_bounded(dog: Watchdog) -> None:
    child = Child(dog)
    for _ in range(100):
        child.says("x" * 1000)
    assert len(dog._wards[child.fd].rest) <= watchdog.LONGEST_LINE


def test_a_pulse_beats_at_most_every_half_second_and_never_waits(monkeypatch) -> None:
    ours, theirs = os.pipe()
    now = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    pulse = Pulse(theirs)
    pulse.begun()
    for _ in range(10):
        pulse.beat()
    now[0] += BEAT
    pulse.beat()
    assert pulse.stuck("two\nlines")
    assert os.read(ours, 100) == b"+\n.\n.\n!two lines\n"
    while pulse.stuck("x" * 4000):  # the pipe fills up
        pass
    now[0] += BEAT
    pulse.beat()
    os.close(ours)
    assert not pulse.stuck("nobody reads")
    os.close(theirs)


def test_a_pulse_without_a_supervisor_does_nothing() -> None:
    pulse = Pulse(-1)
    pulse.begun()
    pulse.beat()
    assert not pulse.stuck("x")


def test_what_a_child_said_just_now_counts_when_stacks_are_wanted(dog: Watchdog, monkeypatch) -> None:
    child = Child(dog)
    os.write(child.end, b"+\n.\n")
    killed: list[int] = []
    monkeypatch.setattr(watchdog.os, "kill", lambda pid, number: killed.append(number))
    dog.dump()
    assert killed == [watchdog.signal.SIGUSR2]
