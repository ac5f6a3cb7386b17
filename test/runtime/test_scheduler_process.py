"""The scheduler process for real: its own interpreter, ipc sockets, the real brain. The test is the API and the runner."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from fakes import FakeRunner, continuation

from radixpd.config.facts import MachineFacts, ModelFacts
from radixpd.config.resolve import Resolved, resolve, to_json
from radixpd.config.settings import CacheSettings, SchedulerSettings, ServerSettings, Settings
from radixpd.core.effects import Finished
from radixpd.core.request import SamplingParams
from radixpd.core.step import StepPlan
from radixpd.runtime.child import Launch
from radixpd.runtime.links import Addresses, Receiver, Sender
from radixpd.runtime.messages import (
    Abort,
    Batch,
    Control,
    Failed,
    FromScheduler,
    Generate,
    Load,
    Reply,
    RunnerReady,
    Shutdown,
    Step,
    Stepped,
    Stop,
    ToRunner,
)
from radixpd.runtime.scheduler_process import STANDSTILL

ROOT = Path(__file__).parents[2]
SECONDS = 20
MODEL = ModelFacts(
    architecture="LlamaForCausalLM", vocab_size=256, layers=1, heads=1, kv_heads=1, head_dim=8, hidden=8, intermediate=8,
    context_length=256, dtype="float32", tied=True, eos_ids=(0,),
)  # fmt: skip
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)


def settings(**changes: Any) -> Settings:
    base = Settings(
        cache=CacheSettings(page_size=4, max_total_tokens=256),
        scheduler=SchedulerSettings(max_running_requests=8, decode_log_interval=2),
    )
    return replace(base, **changes)


class Group:
    """A scheduler process and both of its neighbours. `pump` moves messages until a condition holds."""

    def __init__(self, options: Settings, *, watched: bool = False) -> None:
        machine = MachineFacts(available_memory=2**30, cores=1)
        self.resolved: Resolved = resolve(options, directory="", tokenizer_directory="", model=MODEL, machine=machine, seed=1)
        self.home = tempfile.TemporaryDirectory(prefix="radixpd-")
        addresses = Addresses(self.home.name)
        self.context: zmq.Context[Any] = zmq.Context()
        self.api_in: Receiver[FromScheduler] = Receiver(self.context, addresses.to_api, FromScheduler, bind=True)
        self.api_out = Sender(self.context, addresses.to_scheduler)
        self.runner_in: Receiver[ToRunner] = Receiver(self.context, addresses.to_runner(0), ToRunner, bind=True)
        self.runner_out = Sender(self.context, addresses.from_runner)
        self.signs, watch_fd = os.pipe() if watched else (-1, -1)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "radixpd.runtime.scheduler_process"],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stderr=subprocess.PIPE,
            pass_fds=(watch_fd,) if watched else (),
        )  # fmt: skip
        if watched:
            os.close(watch_fd)
        launch = Launch(to_json(self.resolved), self.home.name, os.getpid(), watch_fd=watch_fd)
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(launch) + b"\n")
        self.process.stdin.flush()
        self.runner = FakeRunner(
            pages=self.resolved.pages,
            page_size=self.resolved.page_size,
            slots=self.resolved.max_running,
            context_length=self.resolved.context_length,
        )
        self.answers = True  # the runner does
        self.held: list[StepPlan] = []
        self.got: list[FromScheduler] = []
        self.shut_down = False

    def ready(self, pages: int | None = None) -> None:
        self.runner_out.send(RunnerReady(pages or self.resolved.pages, self.resolved.page_size, "", 0.0))

    def generate(self, rid: str, prompt: list[int], params: SamplingParams = GREEDY) -> np.ndarray:
        ids = np.array(prompt, dtype=np.int32)
        self.api_out.send(Generate((rid,), ids, params, b"", 0, time.monotonic()))
        return ids

    def pump(self, until: Callable[[], bool], seconds: float = SECONDS) -> None:
        poller = zmq.Poller()
        poller.register(self.api_in.socket, zmq.POLLIN)
        poller.register(self.runner_in.socket, zmq.POLLIN)
        deadline = time.monotonic() + seconds
        while not until():
            assert poller.poll(max(0, int((deadline - time.monotonic()) * 1000))), f"nothing more came; got {self.got}"
            self.got += self.api_in.drain()
            for message in self.runner_in.drain():
                if isinstance(message, Shutdown):
                    self.shut_down = True
                elif self.answers:
                    self.answer(message)
                else:
                    self.held.append(message.plan)

    def answer(self, message: Step) -> None:
        self.runner_out.send(Stepped(self.runner.step(message.plan)))

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.got if isinstance(message, kind)]

    def finished(self) -> dict[str, Finished]:
        ends = [end for batch in self.of(Batch) for end in batch.finished]
        assert len({end.rid for end in ends}) == len(ends), "a second end"
        return {end.rid: end for end in ends}

    def output(self, rid: str) -> list[int]:
        steps = [step for batch in self.of(Batch) for step in batch.tokens]
        return [int(token) for step in steps for each, token in zip(step.rids, step.ids) if each == rid]

    def control(self, action: str) -> Reply:
        number = len(self.of(Reply)) + 1
        self.api_out.send(Control(number, action))
        self.pump(lambda: len(self.of(Reply)) == number)
        reply: Reply = self.of(Reply)[-1]
        assert reply.id == number
        return reply

    def end(self) -> tuple[int, str]:
        """Exit code and log of the process, which must be on its way out."""
        _, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, err.decode()

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=SECONDS)
        self.context.destroy(linger=0)
        self.home.cleanup()
        if self.signs >= 0:
            os.close(self.signs)


Start = Callable[..., Group]


@pytest.fixture
def start() -> Iterator[Start]:
    groups: list[Group] = []

    def launch(options: Settings | None = None, **rest: Any) -> Group:
        groups.append(Group(options or settings(), **rest))
        return groups[-1]

    yield launch
    for group in groups:
        group.close()


@pytest.fixture
def group(start: Start) -> Group:
    """Ready for requests."""
    group = start()
    group.ready()
    group.pump(lambda: bool(group.of(Load)))
    return group


def test_the_first_load_comes_when_the_runner_is_ready_and_early_requests_wait(start: Start) -> None:
    group = start()
    prompt = group.generate("early", [1, 2, 3, 4, 5])
    assert group.control("state").body["requests"][0]["rid"] == "early"
    assert not group.of(Load)
    assert not group.held
    group.ready()
    group.pump(lambda: "early" in group.finished())
    assert group.of(Load)
    assert group.output("early") == continuation(prompt, GREEDY)


@pytest.mark.parametrize("overlap_off", [False, True])
def test_every_request_gets_its_tokens_and_one_end(start: Start, overlap_off: bool) -> None:
    options = settings(scheduler=SchedulerSettings(max_running_requests=4, disable_overlap_schedule=overlap_off, chunked_prefill_size=8))
    group = start(options)
    group.ready()
    prompts = {f"r{i}": group.generate(f"r{i}", [7, 7, 7, *range(1, 2 + 3 * i)]) for i in range(10)}
    group.pump(lambda: len(group.finished()) == 10)
    for rid, prompt in prompts.items():
        assert group.output(rid) == continuation(prompt, GREEDY)
        assert group.finished()[rid].finish.kind == "length"
        assert group.finished()[rid].completion == 6
    group.pump(lambda: group.of(Load)[-1].load.finished_total == 10)
    load = group.of(Load)[-1].load
    assert (load.running, load.waiting, load.request_pages) == (0, 0, 0)
    assert load.generated_tokens_total >= 60


def test_a_warm_prompt_is_cached_and_flush_forgets_it(group: Group) -> None:
    for rid in ("cold", "warm"):
        group.generate(rid, list(range(1, 18)))
        group.pump(lambda: rid in group.finished())  # noqa: B023
    assert group.finished()["cold"].cached == 0
    assert group.finished()["warm"].cached == 16
    assert group.control("flush_cache").error == ""
    group.generate("again", list(range(1, 18)))
    group.pump(lambda: "again" in group.finished())
    assert group.finished()["again"].cached == 0


def test_flush_is_refused_while_a_request_runs(group: Group) -> None:
    group.answers = False
    group.generate("a", [1, 2, 3])
    group.pump(lambda: bool(group.held))
    assert group.control("flush_cache").error == "requests are running"
    assert group.control("dance").error == "unknown action dance"


def test_flush_waits_for_the_steps_of_a_request_that_has_ended(group: Group) -> None:
    group.answers = False
    group.generate("stopped", [1, 2, 3])
    group.pump(lambda: bool(group.held))
    group.api_out.send(Stop("stopped", 0, "x"))
    group.pump(lambda: "stopped" in group.finished())
    group.api_out.send(Control(99, "flush_cache"))
    assert group.control("state").body["in_flight"] > 0
    assert not any(isinstance(message, Reply) and message.id == 99 for message in group.got)
    group.answers = True
    for plan in group.held:
        group.answer(Step(plan))
    group.pump(lambda: any(isinstance(message, Reply) and message.id == 99 and not message.error for message in group.got))


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_is_told_when_the_runner_is_still_and_lasts_until_continue(start: Start, mode: str) -> None:
    group = start(settings(server=ServerSettings(watchdog_timeout=1)))
    group.answers = False
    group.ready()
    prompt = group.generate("running", [1, 2, 3])
    group.pump(lambda: bool(group.held))
    group.api_out.send(Control(99, f"pause_{mode}"))
    assert group.control("state").body["in_flight"] > 0
    assert [reply.id for reply in group.of(Reply)] == [1]
    late = group.generate("late", [4, 5, 6])
    group.answers = True
    for plan in group.held:
        group.answer(Step(plan))
    group.pump(lambda: any(reply.id == 99 for reply in group.of(Reply)))
    load = group.of(Load)[-1].load
    assert (load.paused, load.held) == (True, 2)
    assert (load.running, load.waiting) == ((1, 1) if mode == "in_place" else (0, 2))
    before, loads = len(group.output("running")), len(group.of(Load))
    group.pump(lambda: len(group.of(Load)) >= loads + 3)  # longer than the watchdog allows a step
    assert not group.of(Failed)
    assert len(group.output("running")) == before
    group.api_out.send(Control(7, "flush_cache"))
    group.pump(lambda: any(reply.id == 7 for reply in group.of(Reply)))
    assert group.of(Reply)[-1].error == ("requests are running" if mode == "in_place" else "")
    group.api_out.send(Control(8, "continue"))
    group.pump(lambda: len(group.finished()) == 2)
    assert group.output("running") == continuation(prompt, GREEDY)
    assert group.output("late") == continuation(late, GREEDY)
    group.pump(lambda: not group.of(Load)[-1].load.paused)


def test_a_pause_that_aborts_tells_the_ends_first(group: Group) -> None:
    group.answers = False
    group.generate("a", [1, 2, 3])
    group.pump(lambda: bool(group.held))
    group.api_out.send(Control(99, "pause_abort"))
    group.answers = True
    for plan in group.held:
        group.answer(Step(plan))
    group.pump(lambda: bool(group.of(Reply)))
    assert group.finished()["a"].finish.message == "aborted by a pause"
    assert group.finished()["a"].finish.status == 499


def test_shutdown_of_a_paused_scheduler_waits_for_continue_or_aborts(group: Group) -> None:
    assert group.control("pause_in_place").error == ""
    group.generate("a", [1, 2, 3])
    group.api_out.send(Shutdown())
    assert group.control("state").body["requests"]
    group.api_out.send(Abort("a"))
    group.pump(lambda: group.shut_down)
    assert group.end()[0] == 0


def test_abort_and_stop_end_a_request_once(group: Group) -> None:
    group.answers = False
    prompt = group.generate("stopped", [1, 2, 3])
    group.generate("aborted", [4, 5, 6])
    group.pump(lambda: bool(group.held))
    group.api_out.send(Abort("aborted", "the client went away", 499))
    group.api_out.send(Abort("unknown"))
    group.pump(lambda: "aborted" in group.finished())
    group.answers = True
    for plan in group.held:
        group.answer(Step(plan))
    group.pump(lambda: bool(group.output("stopped")))
    group.api_out.send(Stop("stopped", 1, "x"))
    group.pump(lambda: "stopped" in group.finished())
    assert group.finished()["aborted"].finish.kind == "abort"
    assert group.finished()["aborted"].finish.message == "the client went away"
    assert group.finished()["stopped"].completion in (1, 6)
    assert group.output("stopped") == continuation(prompt, GREEDY, count=len(group.output("stopped")))


def test_shutdown_reaches_the_runner_and_ends_with_0(group: Group) -> None:
    group.api_out.send(Shutdown())
    group.pump(lambda: group.shut_down)
    assert group.end()[0] == 0


def test_shutdown_lets_running_requests_finish(group: Group) -> None:
    prompt = group.generate("a", [1, 2, 3])
    group.api_out.send(Shutdown())
    group.pump(lambda: group.shut_down)
    assert group.output("a") == continuation(prompt, GREEDY)
    assert group.end()[0] == 0


STUCK = "the runner process has not answered for 1 s (--watchdog-timeout)"


def test_a_runner_that_is_stuck_is_reported_to_the_supervisor_who_ends_the_group(start: Start) -> None:
    group = start(settings(server=ServerSettings(watchdog_timeout=1)), watched=True)
    group.answers = False
    group.ready()
    group.generate("a", [1, 2, 3])
    signs = b""
    while b"!" not in signs:
        data = os.read(group.signs, 4096)
        assert data, "it ended by itself"
        signs += data
    assert signs.startswith(b"+\n.\n")
    assert signs.split(b"!")[1].decode() == f"{STUCK}\n"
    assert group.process.poll() is None
    assert not group.of(Failed)


def test_without_a_supervisor_that_watches_it_ends_the_group_itself(start: Start) -> None:
    group = start(settings(server=ServerSettings(watchdog_timeout=1)))
    group.answers = False
    group.ready()
    group.generate("a", [1, 2, 3])
    began = time.monotonic()
    group.pump(lambda: bool(group.of(Failed)))
    assert time.monotonic() - began >= 1
    assert group.of(Failed)[0].message == STUCK
    assert group.end()[0] == 1


def test_a_pause_of_the_whole_machine_is_not_the_runners_fault(start: Start) -> None:
    """Stopped for longer than the watchdog allows, with a step in flight; then the runner answers, a little late."""
    group = start(settings(server=ServerSettings(watchdog_timeout=1)), watched=True)
    group.answers = False
    group.ready()
    group.generate("a", [1, 2, 3])
    group.pump(lambda: bool(group.held))
    group.process.send_signal(signal.SIGSTOP)
    time.sleep(STANDSTILL + 0.5)  # the pause itself
    os.read(group.signs, 65536)
    group.process.send_signal(signal.SIGCONT)
    signs = b""
    while signs.count(b".") < 2:  # it has turned at least once
        signs += os.read(group.signs, 4096)
    group.answers = True
    for plan in group.held:
        group.answer(Step(plan))
    group.pump(lambda: "a" in group.finished())
    assert b"!" not in signs


def test_a_slow_load_and_a_long_idle_time_do_not_trip_the_watchdog(start: Start) -> None:
    group = start(settings(server=ServerSettings(watchdog_timeout=1)))
    assert not group.api_in.socket.poll(1200)
    group.ready()
    group.pump(lambda: len(group.of(Load)) >= 3)  # longer than the watchdog allows a step
    group.generate("a", [1, 2, 3])
    group.pump(lambda: "a" in group.finished())
    assert not group.of(Failed)


def test_a_ready_loop_shows_that_it_turns_idle_and_busy(group: Group) -> None:
    """One unchanged `Load` a second, no flood."""
    began = time.monotonic()
    group.pump(lambda: len(group.of(Load)) >= 3, seconds=5)
    assert time.monotonic() - began > 1.5
    assert len({load.load for load in group.of(Load)}) == 1
    group.answers = False
    group.generate("a", [1, 2, 3])
    group.pump(lambda: bool(group.held))
    before = len(group.of(Load))
    group.pump(lambda: len(group.of(Load)) >= before + 3, seconds=5)
    assert len({load.load for load in group.of(Load)[-2:]}) == 1


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (msgspec.msgpack.encode(["Failed", "the model runner failed (MemoryError)"]), "the model runner failed (MemoryError)"),
        (b"\x80\x04garbage", "a message between processes was damaged"),
        (msgspec.msgpack.encode(["RunnerReady", 3, 4, "", 0.0]), "the model runner has 3 KV pages where 64 were decided"),
    ],
)
def test_a_failing_runner_ends_the_group_with_a_message(group: Group, frame: bytes, message: str) -> None:
    group.runner_out.socket.send(frame)
    group.pump(lambda: bool(group.of(Failed)))
    assert group.of(Failed)[0].message == message
    code, log = group.end()
    assert code == 1
    assert "Traceback" not in log


def test_end_of_the_control_pipe_ends_the_process(group: Group) -> None:
    assert group.process.stdin is not None
    group.process.stdin.close()
    group.process.stdin = None
    assert group.end()[0] == 1


def test_waiting_takes_no_cpu(group: Group) -> None:
    """Neither idle, nor while a step is under way."""
    before = group.cpu_seconds()
    assert not group.api_in.socket.poll(500)
    group.answers = False
    group.generate("a", [1, 2, 3])
    group.pump(lambda: bool(group.held) and bool(group.of(Load)[-1].load.running))
    while group.api_in.socket.poll(500):
        group.got += group.api_in.drain()
    assert group.cpu_seconds() - before < 0.2


def test_log_lines_are_those_that_users_grep(group: Group) -> None:
    group.generate("a", list(range(1, 18)))
    group.pump(lambda: "a" in group.finished())
    group.api_out.send(Shutdown())
    _, log = group.end()
    assert re.search(
        r"Prefill batch\. #new-seq: 1, #new-token: 17, #cached-token: 0, token usage: 0\.\d\d, #running-req: \d, #queue-req: 0", log
    )
    assert re.search(
        r"Decode batch\. #running-req: 1, #token: \d+, token usage: 0\.\d\d, gen throughput \(token/s\): \d+\.\d\d, #queue-req: 0", log
    )


def test_a_retraction_is_logged(start: Start) -> None:
    options = settings(
        cache=CacheSettings(page_size=1, max_total_tokens=40, disable_radix_cache=True),
        scheduler=SchedulerSettings(max_running_requests=4, schedule_conservativeness=0.05),
    )
    group = start(options)
    group.ready()
    params = replace(GREEDY, max_new_tokens=25)
    prompts = {rid: group.generate(rid, [ord(rid)] * 8, params) for rid in "abcd"}
    group.pump(lambda: len(group.finished()) == 4)
    for rid, prompt in prompts.items():
        assert group.output(rid) == continuation(prompt, params)
    group.api_out.send(Shutdown())
    assert "KV cache pool is full. Retract requests. #retracted_reqs: " in group.end()[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_kv_events_are_published_and_replayed(start: Start) -> None:
    events, replay = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    config = msgspec.json.encode({"publisher": "zmq", "endpoint": events, "replay_endpoint": replay}).decode()
    group = start(settings(cache=CacheSettings(page_size=4, max_total_tokens=256, kv_events_config=config)))
    group.ready()
    group.generate("a", list(range(1, 18)))
    group.pump(lambda: "a" in group.finished())
    reader: zmq.Socket[Any] = group.context.socket(zmq.DEALER)
    reader.connect(replay)
    reader.send_multipart([b"", (0).to_bytes(8, "big")])
    assert reader.poll(SECONDS * 1000)
    _, sequence, payload = reader.recv_multipart()
    assert sequence == bytes(8)
    kind, hashes, parent, tokens, size, *_ = msgspec.msgpack.decode(payload)[1][0]
    assert (kind, parent, size) == ("BlockStored", None, 4)
    assert tokens == list(range(1, 1 + 4 * len(hashes)))
    subscriber: zmq.Socket[Any] = group.context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(events)
    deadline = time.monotonic() + SECONDS
    number = 0
    # A subscription takes effect some time after connect: make events until one comes through.
    while not subscriber.poll(50):
        assert time.monotonic() < deadline
        number += 1
        group.generate(f"b{number}", [number] * 9)
        group.pump(lambda: f"b{number}" in group.finished())  # noqa: B023
    assert subscriber.recv_multipart()[0] == b""


def test_an_events_port_in_use_is_one_line_and_exit_2(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config = msgspec.json.encode({"endpoint": endpoint}).decode()
        group = start(settings(cache=CacheSettings(page_size=4, max_total_tokens=256, kv_events_config=config)))
        code, log = group.end()
    assert code == 2
    assert log.strip() == f"radixpd: error: --kv-events-config: cannot bind {endpoint}: Address already in use"


def test_no_torch_lives_in_the_process(group: Group) -> None:
    assert "torch" not in Path(f"/proc/{group.process.pid}/maps").read_text()
