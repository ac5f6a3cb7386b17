"""Every pair of settings at least once: the same requests give the same answers, cold and warm, whatever the settings.

`all_pairs` makes few rows that hold every allowed pair of values; each row is a server. The reference is a default server that runs each
request alone. bfloat16 rounds too coarsely for equality: its rows check that requests end as they should and that no page is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from e2e.reference import Reference, answers, solo
from e2e.servers import ASCII_BIAS, Server, together

Row = dict[str, str]

FACTORS: dict[str, Sequence[str]] = {
    "schedule-policy": ("fcfs", "lpm", "dfs-weight", "random", "priority"),
    "radix-eviction-policy": ("lru", "lfu", "fifo", "priority"),
    "chunked-prefill-size": ("32", "512", "-1"),
    "page-size": ("1", "16"),
    "overlap": ("on", "off"),
    "mixed": ("off", "on"),
    "cache": ("on", "off"),
    "pool": ("small", "large"),
    "stream-interval": ("1", "7"),
}
PRODUCT = {name: FACTORS[name] for name in ("page-size", "chunked-prefill-size", "overlap", "mixed", "cache")}
SWITCHES = {
    ("overlap", "off"): "--disable-overlap-schedule",
    ("mixed", "on"): "--enable-mixed-chunk",
    ("cache", "off"): "--disable-radix-cache",
}
# Room for the longest request and little more; admission believes in short outputs, so that the pool runs dry.
POOLS = {"small": ("--max-total-tokens", "768", "--schedule-conservativeness", "0.05"), "large": ("--max-total-tokens", "8192")}


def allowed(row: Mapping[str, str]) -> bool:
    """Chunks that are never cut have nothing to mix; the command line refuses that pair."""
    return not (row.get("chunked-prefill-size") == "-1" and row.get("mixed") == "on")


def pairs(factors: Mapping[str, Sequence[str]]) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    """All allowed pairs of values of two factors."""
    return {
        ((one, x), (two, y))
        for one, two in itertools.combinations(factors, 2)
        for x in factors[one]
        for y in factors[two]
        if allowed({one: x, two: y})
    }


def covered(row: Row) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    """The pairs that a row holds."""
    return set(itertools.combinations(row.items(), 2))


def all_pairs(factors: Mapping[str, Sequence[str]]) -> list[Row]:
    """Rows that hold every allowed pair: each starts with a missing pair and takes the values that add most."""
    missing, rows = pairs(factors), []
    while missing:
        row = dict(min(missing))
        for name in factors:
            if name in row:
                continue
            options = [value for value in factors[name] if allowed({**row, name: value})]
            used = [sum(value in done.values() for done in rows) for value in options]
            gains = [
                len(missing & {tuple(sorted((have, (name, value)), key=lambda x: list(factors).index(x[0]))) for have in row.items()})
                for value in options
            ]
            row[name] = max(zip(gains, (-count for count in used), options))[2]
        rows.append({name: row[name] for name in factors})
        missing -= covered(rows[-1])
    return rows


def bfloat16_rows() -> list[Row]:
    """Rows that hold every single value."""
    count = max(map(len, FACTORS.values()))
    rows = [{name: values[index % len(values)] for name, values in FACTORS.items()} for index in range(count)]
    return [row if allowed(row) else {**row, "mixed": "off"} for row in rows]


ROWS = all_pairs(FACTORS)
PRODUCT_ROWS = [row for row in (dict(zip(PRODUCT, values)) for values in itertools.product(*PRODUCT.values())) if allowed(row)]


def ids(seed: int, length: int) -> list[int]:
    """Token ids of the tiny model that look random, the same in each run."""
    return [3 + (seed * 7919 + i * i * 31 + i * 17) % 250 for i in range(length)]


SHARED = ids(1, 200)
GREEDY = {"temperature": 0, "ignore_eos": True}
BODIES: list[dict[str, Any]] = [
    {"input_ids": SHARED + ids(2, 10), "sampling_params": {**GREEDY, "max_new_tokens": 64}, "return_logprob": True},
    {"input_ids": SHARED + ids(3, 33), "sampling_params": {**GREEDY, "max_new_tokens": 80}},
    {"input_ids": ids(4, 700), "sampling_params": {**GREEDY, "max_new_tokens": 32}},
    {"input_ids": ids(5, 40), "sampling_params": {"temperature": 1, "sampling_seed": 7, "ignore_eos": True, "n": 2, "max_new_tokens": 48}},
    {"input_ids": ids(6, 60), "sampling_params": {**GREEDY, "max_new_tokens": 80, "logit_bias": ASCII_BIAS}},  # gets a stop string
    {"input_ids": SHARED + ids(7, 5), "sampling_params": {"temperature": 1, "sampling_seed": 11, "ignore_eos": True, "max_new_tokens": 64}},
    {
        "input_ids": ids(8, 150),
        "sampling_params": {**GREEDY, "max_new_tokens": 64},
        "return_logprob": True,
        "logprob_start_len": 40,
    },
    {"input_ids": ids(9, 1), "sampling_params": {**GREEDY, "max_new_tokens": 96, "frequency_penalty": 0.5}},
]
# Together they need more than the small pool holds, and admission believes that they do not.
CROWD: list[dict[str, Any]] = [{"input_ids": ids(20 + i, 24), "sampling_params": {**GREEDY, "max_new_tokens": 180}} for i in range(5)]
STOPPED = 4  # index of the request that ends by a stop string
Case = tuple[dict[str, Any], list[Reference]]


@pytest.fixture(scope="module")
def cases(server: Server) -> list[Case]:
    """Requests and what they answer alone."""
    text = solo(server, BODIES[STOPPED])[0].text
    # Two characters, so that the stop string is spread over two tokens; the first place where they stand ends the output.
    stop = text[30:32]
    bodies = [*BODIES]
    bodies[STOPPED] = {**BODIES[STOPPED], "sampling_params": {**BODIES[STOPPED]["sampling_params"], "stop": [stop]}}
    found = [(body, solo(server, body)) for body in bodies]
    assert found[STOPPED][1][0].finish == {"type": "stop", "matched": stop}
    return found


def command(row: Row, *, dtype: str) -> list[str]:
    """The flags of a row."""
    flags = ["--dtype", dtype, "--threads", "1", *POOLS[row.get("pool", "small")]]
    for name, value in row.items():
        if name in ("overlap", "mixed", "cache"):
            flags += [SWITCHES[name, value]] if (name, value) in SWITCHES else []
        elif name != "pool":
            flags += [f"--{name}", value]
    return flags


class Fleet:
    """The servers of all rows: while one is tested, the next one starts and the last one drains."""

    def __init__(self, model: Path, commands: list[list[str]]) -> None:
        self._model = model
        self._commands = commands
        self._started: dict[int, Server] = {}

    def __getitem__(self, index: int) -> Server:
        if index > 0 and index - 1 in self._started:
            self._started[index - 1].process.terminate()
        for each in (index, index + 1):
            if each < len(self._commands) and each not in self._started:
                self._started[each] = Server(self._model, *self._commands[each], wait=False)
        self._started[index].wait_ready()
        return self._started[index]

    def close(self) -> None:
        """Every server must end well."""
        assert [server.close() for server in self._started.values()] == [0] * len(self._started)


@pytest.fixture(scope="module")
def fleet(tiny: Path) -> Iterator[Callable[[list[list[str]]], Fleet]]:
    """`fleet(commands)`: one fleet per list of commands."""
    fleets: dict[str, Fleet] = {}

    def get(commands: list[list[str]]) -> Fleet:
        return fleets.setdefault(str(commands), Fleet(tiny, commands))

    yield get
    for each in fleets.values():
        each.close()


def ask(server: Server, body: dict[str, Any], *, stream: bool) -> list[dict[str, Any]]:
    """All outputs of one body; a stream's are its last events, each of which must go on from the one before."""
    if not stream:
        return answers(server.generate(**body))
    events = list(server.stream("/generate", body))
    for before, after in itertools.pairwise(events):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert after["text"].startswith(before["text"])
    assert [event["meta_info"]["finish_reason"] is not None for event in events] == [False] * (len(events) - 1) + [True]
    return [events[-1]]


def run_twice(server: Server, cases: list[Case]) -> list[list[dict[str, Any]]]:
    """All requests at once, cold and then warm; nothing may be left behind."""
    found = []
    for _ in range(2):
        calls = [
            lambda body=body, index=index: ask(server, body, stream=index % 2 == 0 and "n" not in body["sampling_params"])
            for index, (body, _) in enumerate(cases)
        ]
        found += together(calls)
        server.settled()
    server.flush()
    assert server.pages()["tree"] == 0
    assert server.metric("num_used_tokens") == 0
    return found


def check_equal(server: Server, cases: list[Case]) -> None:
    excused = 0
    for found, (_, expected) in zip(run_twice(server, cases), [*cases, *cases], strict=True):
        for output, reference in zip(found, expected, strict=True):
            excused += reference.check(output)
    assert excused <= 1, "too many near ties to be honest ones"


def test_rows_hold_every_pair() -> None:
    held = set().union(*map(covered, ROWS))
    assert held == pairs(FACTORS)
    assert len(held) == 250  # counted by hand: 251, less the pair that is refused
    assert len(ROWS) <= 26
    assert all(map(allowed, ROWS))


def test_a_missing_pair_would_be_seen() -> None:
    only_in_one = [pair for pair in pairs(FACTORS) if sum(pair in covered(row) for row in ROWS) == 1]
    row = next(row for row in ROWS if only_in_one[0] in covered(row))
    assert set().union(*map(covered, (each for each in ROWS if each is not row))) != pairs(FACTORS)


@pytest.fixture(scope="module")
def crowd(server: Server) -> list[Case]:
    """Requests that make the small pool retract, and what they answer alone."""
    return [(body, solo(server, body)) for body in CROWD]


@pytest.mark.parametrize("index", range(len(ROWS)), ids=["-".join(row.values()) for row in ROWS])
def test_every_pair_gives_the_same_answers(
    fleet: Callable[[list[list[str]]], Fleet], cases: list[Case], crowd: list[Case], index: int
) -> None:
    server = fleet([command(row, dtype="float32") for row in ROWS])[index]
    check_equal(server, cases)
    if ROWS[index]["pool"] == "small":
        check_equal(server, crowd)
        assert server.metric("num_retracted_requests") > 0


@pytest.mark.parametrize("index", range(len(bfloat16_rows())))
def test_bfloat16(fleet: Callable[[list[list[str]]], Fleet], cases: list[Case], index: int) -> None:
    server = fleet([command(row, dtype="bfloat16") for row in bfloat16_rows()])[index]
    for found, (body, _) in zip(run_twice(server, cases), [*cases, *cases], strict=True):
        for output in found:
            reason = output["meta_info"]["finish_reason"]
            if body is not cases[STOPPED][0]:
                assert reason == {"type": "length", "length": body["sampling_params"]["max_new_tokens"]}
            assert len(output["output_ids"]) == output["meta_info"]["completion_tokens"]


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(PRODUCT_ROWS)), ids=["-".join(row.values()) for row in PRODUCT_ROWS])
def test_full_product_gives_the_same_answers(fleet: Callable[[list[list[str]]], Fleet], cases: list[Case], index: int) -> None:
    check_equal(fleet([command(row, dtype="float32") for row in PRODUCT_ROWS])[index], cases)
