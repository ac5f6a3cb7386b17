"""A prefill and a decode server answer as one aggregated server does: sixty requests at once, cold and warm, whatever moves the pages.

The unmarked rows hold every pair of (transport, chunk size, page size) for the transports that are always there, and each value with every
transport; the marked ones are the full product, also without overlap. The reference is an aggregated server that answers each request
alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.pd import Pair
from e2e.pd_prompts import COUNT, Case, ids, threads
from e2e.servers import Server, together
from kv.moving import need

CHUNKS, PAGES = ("32", "512"), ("1", "16")
ALWAYS = ("shm", "tcp")  # others need a package
TRANSPORTS = (*ALWAYS, "mooncake", "nixl")
Row = tuple[str, str, str, str]  # transport, chunk size, page size, overlap
ROWS: list[Row] = [
    ("shm", "32", "16", "on"),
    ("shm", "512", "1", "on"),
    ("tcp", "32", "1", "on"),
    ("tcp", "512", "16", "on"),
    ("mooncake", "32", "16", "on"),
    ("mooncake", "512", "1", "on"),
    ("nixl", "32", "1", "on"),
    ("nixl", "512", "16", "on"),
]
PRODUCT = [row for row in itertools.product(TRANSPORTS, CHUNKS, PAGES, ("on", "off")) if row not in ROWS]


def flags(row: Row) -> tuple[str, ...]:
    """The flags of a row, for both servers; without its package a row is skipped."""
    transport, chunk, page, overlap = row
    if transport not in ALWAYS:
        need(transport)
    shown = ["--disaggregation-transfer-backend", transport, "--chunked-prefill-size", chunk, "--page-size", page]
    return (*shown, "--dtype", "float32", "--max-total-tokens", "4096", *(["--disable-overlap-schedule"] if overlap == "off" else []))


@pytest.fixture(scope="module")
def cases(server: Server) -> list[list[Case]]:
    """Requests and what they answer alone."""
    found = threads(server)
    assert sum(map(len, found)) == COUNT
    return found


@pytest.fixture(scope="module")
def the_pair(tiny: Path) -> Iterator[Callable[[Row], Pair]]:
    """The pair of a row. The one before ends."""
    running: list[Pair] = []

    def close() -> None:
        while running:
            assert running.pop().close() == 0

    def get(row: Row) -> Pair:
        wish = flags(row)
        close()
        running.append(Pair.start(tiny, *wish))
        return running[0]

    yield get
    close()


def ask(pair: Pair, case: Case) -> Any:
    """The answer; of a stream the last event, each event going on from the one before."""
    if not case.stream:
        answer = pair.post(case.route, case.body)
        assert answer.status == 200, (case.name, answer.body)
        return answer.json
    events = list(pair.stream(case.route, case.body))
    for before, after in itertools.pairwise(events):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert [event["meta_info"]["finish_reason"] is not None for event in events] == [False] * (len(events) - 1) + [True]
    return events[-1]


def check_equal(pair: Pair, cases: list[list[Case]]) -> None:
    """All threads at once, cold and then warm; nothing may be left behind."""
    excused = 0
    for _ in range(2):
        found = together([lambda thread=thread: [ask(pair, case) for case in thread] for thread in cases])
        for thread, answers in zip(cases, found, strict=True):
            excused += sum(case.check(answer) for case, answer in zip(thread, answers, strict=True))
        pair.settled()
    assert excused <= 1, "too many near ties to be honest ones"
    assert pair.decode.metric("num_fallback_reqs") == 0
    pair.flush()
    assert [server.pages()["tree"] for server in pair.both] == [0, 0]


def test_rows_hold_every_pair() -> None:
    always = [row for row in ROWS if row[0] in ALWAYS]
    for one, other in itertools.combinations(range(3), 2):
        values = [sorted({row[index] for row in always}) for index in (one, other)]
        assert {(row[one], row[other]) for row in always} == set(itertools.product(*values))
    for transport in TRANSPORTS:
        assert {row[1] for row in ROWS if row[0] == transport} == set(CHUNKS)
        assert {row[2] for row in ROWS if row[0] == transport} == set(PAGES)


@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_pairs_answer_as_one_server_does(the_pair: Callable[[Row], Pair], cases: list[list[Case]], row: Row) -> None:
    check_equal(the_pair(row), cases)


@pytest.mark.full
@pytest.mark.parametrize("row", PRODUCT, ids="-".join)
def test_every_setting_answers_as_one_server_does(the_pair: Callable[[Row], Pair], cases: list[list[Case]], row: Row) -> None:
    check_equal(the_pair(row), cases)


def test_without_a_seed_all_tokens_come_from_the_one_that_decode_drew(serve: Callable[..., Server], pair: Callable[..., Pair]) -> None:
    """Each server draws from its own `--random-seed`, so that decode's is what one server would use."""
    common = ("--dtype", "float32", "--random-seed")
    alone, both = serve(*common, "11"), pair(prefill=(*common, "12"), decode=(*common, "11"))
    for index in range(4):
        body = {"input_ids": ids(index, 40), "sampling_params": {"temperature": 1.0, "max_new_tokens": 3, "ignore_eos": True, "n": 2}}
        found, expected = both.generate(**body), alone.generate(**body)
        assert [each["output_ids"] for each in found] == [each["output_ids"] for each in expected]
    assert both.decode.metric("num_fallback_reqs") == 0
