"""The runner process around an engine without torch: the test is the scheduler."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from fakes import continuation

from radixpd.config.facts import MachineFacts, ModelFacts
from radixpd.config.resolve import resolve, to_json
from radixpd.config.settings import CacheSettings, SchedulerSettings, Settings
from radixpd.core.request import SamplingParams
from radixpd.core.step import SlotBegin, StepPlan
from radixpd.runtime.child import Launch
from radixpd.runtime.links import Addresses, Receiver, Sender
from radixpd.runtime.messages import Failed, FromRunner, RunnerReady, Shutdown, Step, Stepped

ROOT = Path(__file__).parents[2]
SECONDS = 20
MODEL = ModelFacts(
    architecture="LlamaForCausalLM", vocab_size=256, layers=1, heads=1, kv_heads=1, head_dim=8, hidden=8, intermediate=8,
    context_length=64, dtype="float32", tied=True, eos_ids=(0,),
)  # fmt: skip
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=3)
PROMPT = np.array([5, 6, 7], dtype=np.int32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def plans() -> list[StepPlan]:
    """A prompt and the two steps after it, in slot 0."""
    first = StepPlan(
        step=1, slots=ids(0), starts=ids(0), lengths=ids(3), sample_rows=ids(0), sample_slots=ids(0),
        page_slots=ids(0, 0), page_positions=ids(0, 1), page_ids=ids(2, 1), begins=(SlotBegin(0, PROMPT, 3, 0, PARAMS),),
    )  # fmt: skip
    later = [StepPlan(step, ids(0), ids(1 + step), ids(1), ids(0), ids(0)) for step in (2, 3)]
    return [first, *later]


class Peer:
    """A runner process and the scheduler's end of its links."""

    def __init__(self, fake: str = "") -> None:
        options = Settings(cache=CacheSettings(page_size=4, max_total_tokens=32), scheduler=SchedulerSettings(max_running_requests=2))
        machine = MachineFacts(available_memory=2**30, cores=1)
        resolved = resolve(options, directory="", tokenizer_directory="", model=MODEL, machine=machine, seed=1)
        self.home = tempfile.TemporaryDirectory(prefix="radixpd-")
        addresses = Addresses(self.home.name)
        self.context: zmq.Context[Any] = zmq.Context()
        self.results: Receiver[FromRunner] = Receiver(self.context, addresses.from_runner, FromRunner, bind=True)
        self.plans = Sender(self.context, addresses.to_runner(0))
        path = f"{ROOT}:{ROOT / 'test'}:{Path(__file__).parent / 'fake_children'}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fake_engine_runner"],
            env={**os.environ, "PYTHONPATH": path, "FAKE": fake},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(Launch(to_json(resolved), self.home.name, os.getpid())) + b"\n")
        self.process.stdin.flush()

    def receive(self, count: int) -> list[FromRunner]:
        got: list[FromRunner] = []
        while len(got) < count:
            assert self.results.socket.poll(SECONDS * 1000), f"nothing more came; got {got}"
            got += self.results.drain()
        return got

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, out.decode(), err.decode()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=SECONDS)
        self.context.destroy(linger=0)
        self.home.cleanup()


Start = Callable[..., Peer]


@pytest.fixture
def start() -> Iterator[Start]:
    peers: list[Peer] = []

    def launch(fake: str = "") -> Peer:
        peers.append(Peer(fake))
        return peers[-1]

    yield launch
    for peer in peers:
        peer.close()


def test_plans_sent_before_it_is_ready_run_in_order_after(start: Start) -> None:
    peer = start()
    for plan in plans():
        peer.plans.send(Step(plan))
    peer.plans.send(Shutdown())
    ready, *steps = peer.receive(4)
    assert isinstance(ready, RunnerReady)
    assert (ready.pages, ready.page_size) == (8, 4)
    results = [message.result for message in steps if isinstance(message, Stepped)]
    assert [result.step for result in results] == [1, 2, 3]
    assert [int(result.tokens[0]) for result in results] == continuation(PROMPT, PARAMS)
    assert all(result.seconds > 0 for result in results)
    assert peer.end()[:2] == (0, "closed\n")


def test_a_config_error_is_one_line_and_exit_2(start: Start) -> None:
    code, _, err = start("config").end()
    assert (code, err) == (2, "radixpd: error: --dtype does not fit\n")


@pytest.mark.parametrize(("fake", "kind"), [("break", "MemoryError"), ("crash", "OSError")])
def test_a_failure_reaches_the_scheduler_without_its_details(start: Start, fake: str, kind: str) -> None:
    peer = start(fake)
    peer.plans.send(Step(plans()[0]))
    failed = peer.receive(1 if fake == "crash" else 2)[-1]
    assert failed == Failed(f"the model runner failed ({kind})")
    code, _, err = peer.end()
    assert code == 1
    assert "/secret/path" in err


def test_a_damaged_plan_is_a_failure(start: Start) -> None:
    peer = start()
    peer.plans.socket.send(b"\x80\x04garbage")
    assert isinstance(peer.receive(2)[-1], Failed)
    assert peer.end()[0] == 1


def test_it_ends_when_the_control_pipe_does(start: Start) -> None:
    peer = start()
    peer.receive(1)
    assert peer.process.stdin is not None
    peer.process.stdin.close()
    peer.process.stdin = None
    assert peer.end()[0] == 1
