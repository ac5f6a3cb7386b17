"""One side of a prefill/decode pair is killed, stopped, started again or cut off, in each phase of a handoff.

Whatever happens: every client ends within its deadline, with the text that it would get alone or with one clear error; the pages of whoever
lives are whole again once the other's fate is known; the next twenty requests work, without any other restart. Decode's KV is reused under
pressure right after a stopped writer has gone on.
"""

from __future__ import annotations

import itertools
import signal
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from e2e.chaos import Group, cannot_cut
from e2e.pd import hang_up, open_leg, phases
from e2e.pd_prompts import ids
from e2e.reference import Reference, solo
from e2e.servers import Server, together, until

FAULTS = ("kill", "pause", "restart", "cut")
PHASES = ("reserve", "transfer", "arrived")
SIDES = ("prefill", "decode")
BACKENDS = ("shm", "tcp")
IN_TEST = {  # of the product, what `make test` runs: each fault, phase, side and backend at least once
    ("kill", "transfer", "prefill", "shm"), ("pause", "transfer", "prefill", "tcp"),
    ("restart", "arrived", "decode", "tcp"), ("cut", "reserve", "prefill", "tcp"),
}  # fmt: skip
DEADLINE = 60.0  # seconds for a client's answer: more than any of the deadlines below
FLAGS = (
    *("--max-total-tokens", "1024"),
    *("--disaggregation-bootstrap-timeout", "8", "--disaggregation-transfer-timeout", "20", "--disaggregation-reserve-timeout", "20"),
)
SLOW = 0.0008  # gigabits a second: the prompt takes more than a second
PROMPT, OUTPUT = 300, 24
LONG = 900  # tokens of whoever fills decode's pool
NEXT = 20  # requests afterwards
PAUSE = 8.0  # seconds: longer than the five after which a peer counts as silent


def native(seed: int, prompt: int = PROMPT, tokens: int = OUTPUT) -> dict[str, Any]:
    return {"input_ids": ids(seed, prompt), "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}}


@pytest.fixture
def group(tiny: Path) -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def start(*flags: str, **options: Any) -> Group:
        groups.append(Group(tiny, *FLAGS, *flags, **options))
        return groups[-1]

    yield start
    for each in groups:
        each.close()


class Client:
    """One request of a client, on both legs, while things break."""

    def __init__(self, group: Group, body: dict[str, Any], pool: ThreadPoolExecutor) -> None:
        self.body = group.pair.named(body)
        self.first, self.second = (pool.submit(self._ask, group.servers[side], self.body) for side in SIDES)

    @staticmethod
    def _ask(server: Server, body: dict[str, Any]) -> Any:
        try:
            return server.post("/generate", body, timeout=DEADLINE)
        except (OSError, urllib.error.URLError) as error:  # the server has died
            return error

    def check(self, expected: Reference, *, victim: str) -> None:
        """Decode's leg gives the right text if decode lives, prefill's ends too."""
        answer = self.second.result(DEADLINE)
        if victim != "decode":
            assert not isinstance(answer, Exception), answer
            assert answer.status == 200, answer.body
            expected.check(answer.json)
        else:
            self._one_clear_end(answer)
        self._one_clear_end(self.first.result(DEADLINE))

    @staticmethod
    def _one_clear_end(answer: Any) -> None:
        if isinstance(answer, Exception):
            assert "timed out" not in str(answer), answer
        elif answer.status != 200:
            assert answer.json["error"]["message"], answer.body


def reach(group: Group, phase: str, pool: ThreadPoolExecutor) -> tuple[Client, Future[Any] | None]:
    """A request in this phase; in `reserve`, also the one whose pages it waits for."""
    prefill, decode = group.servers["prefill"], group.servers["decode"]
    blocker = None
    if phase == "reserve":
        blocker = pool.submit(Client._ask, decode, native(1, 100, LONG))
        until(lambda: phases(decode) == ["running"], "decode is busy")
        assert decode.post("/pause_generation", {"mode": "in_place"}).status == 200  # and stays so
    client = Client(group, native(2, PROMPT, 300 if phase == "arrived" else OUTPUT), pool)
    if phase == "reserve":
        until(lambda: "parked" in phases(decode) and "parked" in phases(prefill), "both wait for pages of decode")
    elif phase == "transfer":
        until(lambda: phases(prefill) == ["sending"] and phases(decode) == ["parked"], "pages are on their way")
    else:
        until(lambda: phases(decode) == ["running"], "decode generates")
    return client, blocker


def strike(group: Group, fault: str, side: str) -> None:
    match fault:
        case "kill" | "restart":
            group.kill(side)
        case "pause":
            group.signal(side, signal.SIGSTOP)
        case "cut":
            group.cut()


def release(group: Group) -> None:
    """Decode goes on with whoever was in the way."""
    decode = group.servers["decode"]
    if decode.process.poll() is None:
        assert decode.post("/continue_generation", timeout=DEADLINE).status == 200


def mend(group: Group, fault: str, side: str) -> None:
    """As an operator would: a killed decode server has to come back, a killed prefill server need not."""
    if fault == "restart" or (fault == "kill" and side == "decode"):
        group.start(side)
    elif fault == "pause":
        group.signal(side, signal.SIGCONT)


def expected_of(server: Server, *bodies: dict[str, Any]) -> list[Reference]:
    return [solo(server, body)[0] for body in bodies]


def go_on(group: Group, server: Server, *, prefill_lives: bool) -> None:
    """The next requests are right, and pages whole. Their prompts fill the pool again and again. As a router does, a client drops prefill's
    leg once decode has answered: while they do not know of each other again, decode computes alone and nobody tells prefill."""
    bodies = [native(100 + index, 200 + 10 * index, 12) for index in range(NEXT)]
    expected = expected_of(server, *bodies)
    pair = group.pair

    def ask(body: dict[str, Any]) -> Any:
        body = pair.named(body)
        leg = open_leg(pair.prefill, "/generate", body) if prefill_lives else None
        answer = pair.decode.post("/generate", body, timeout=DEADLINE)
        if leg is not None:
            hang_up(leg)
        assert answer.status == 200, answer.body
        return answer.json

    batches = [bodies[first : first + 4] for first in range(0, NEXT, 4)]
    found = [answer for batch in batches for answer in together([lambda body=body: ask(body) for body in batch])]
    assert sum(reference.check(answer) for reference, answer in zip(expected, found, strict=True)) <= 1
    handed_over = [answer["meta_info"]["kv_journey"]["prefill_computed_tokens"] > 0 for answer in found]
    assert any(handed_over) == prefill_lives
    for side, each in group.servers.items():
        if each.process.poll() is None:
            assert each.settled()["free"] >= 0, side


def product() -> list[Any]:
    marks = {False: [pytest.mark.full], True: []}
    cases = [
        case for case in itertools.product(FAULTS, PHASES, SIDES, BACKENDS) if case[:1] + case[2:3] != ("cut", "decode")
    ]  # it has no side
    return [pytest.param(*case, marks=marks[case in IN_TEST], id="-".join(case)) for case in cases]


@pytest.mark.parametrize(("fault", "phase", "side", "backend"), product())
def test_pd_chaos(group: Callable[..., Group], server: Server, fault: str, phase: str, side: str, backend: str) -> None:
    if fault == "cut" and (reason := cannot_cut()):
        pytest.skip(reason)
    link = SLOW if phase == "transfer" else 0.0
    there = group("--disaggregation-transfer-backend", backend, link=link)
    body = native(2, PROMPT, 300 if phase == "arrived" else OUTPUT)
    (expected,) = expected_of(server, body)
    with ThreadPoolExecutor(8) as pool:
        client, blocker = reach(there, phase, pool)
        strike(there, fault, side)
        if phase == "reserve" and side == "prefill":
            release(there)
        if fault == "pause":
            # What the other side makes of the silence, then the stopped one goes on.
            if side == "decode":
                with pytest.raises(TimeoutError):
                    client.second.result(PAUSE)
            else:
                client.second.result(DEADLINE)
        elif fault == "kill":
            client.first.result(DEADLINE)
            client.second.result(DEADLINE)
        mend(there, fault, side)
        if phase == "reserve" and side == "decode":
            release(there)
        client.check(expected, victim=side if fault in ("kill", "restart") else "")
        if blocker is not None:
            Client._one_clear_end(blocker.result(DEADLINE))
    go_on(there, server, prefill_lives=not (fault == "kill" and side == "prefill"))


def test_a_restarted_decode_server_leaves_no_mapping_behind(group: Callable[..., Group], server: Server) -> None:
    """Each new process of it brings a pool of its own, which prefill maps; the old ones must go."""
    there = group("--disaggregation-transfer-backend", "shm")
    for round_ in range(3):
        body = native(300 + round_)
        (expected,) = expected_of(server, body)
        expected.check(there.pair.generate(**body))
        assert there.pools_mapped("prefill") == 2, "its own, and the peer's"
        there.kill("decode")
        until(lambda: there.pools_mapped("prefill") == 1, "the dead server's pool is unmapped")
        there.start("decode")
    there.pair.settled()
