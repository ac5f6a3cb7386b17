"""The frontend language through a load balancer, before whole servers and before a prefill/decode group: the same variables as one server.

One program with everything in it: turns, forks, choices, sampling from a seed, a stream.
"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import radixpd_lang as rx
from e2e.servers import ASCII_BIAS, Server, free_port, until

pytestmark = pytest.mark.full  # five servers
FLAGS = ("--dtype", "float32", "--max-total-tokens", "4096")
SECONDS = 120.0
NAMES = ("first", "ideas", "grades", "best", "spoken")


@rx.function
def everything(s: rx.ProgramState) -> None:
    s += rx.system("You plan short trips. You never name a place twice, and you keep to the coast.")
    s += rx.user("Where shall we begin?")
    s += rx.assistant(rx.gen("first", max_tokens=10, temperature=0))
    forks = s.fork(3)
    for index, fork in enumerate(forks):
        fork += rx.user(f"Idea {index}, please.")
        fork += rx.assistant("Go " + rx.gen("ideas", max_tokens=8, temperature=0.8) + ": " + rx.select("grades", ["fine", "dull", "wet"]))
    forks.join()
    with s.user():
        s += "We take " + rx.select("best", ["the first", "the second", "the third"])
    s += rx.assistant("So: " + rx.gen("spoken", max_tokens=10, temperature=0))


def variables(url: str, **options: Any) -> list[Any]:
    options |= {"logit_bias": ASCII_BIAS, "ignore_eos": True, "seed": 3}
    state = everything.run(backend=rx.RuntimeEndpoint(url, timeout=SECONDS), timeout=SECONDS, **options)
    if options.get("stream"):
        assert "".join(state.text_iter()) == state.text()
    return [state[name] for name in NAMES]


@pytest.fixture(scope="module")
def expected(serve: Callable[..., Server]) -> list[Any]:
    """What one server says."""
    return variables(serve(*FLAGS).url)


@pytest.fixture(scope="module")
def balancer(serve: Callable[..., Server]) -> Iterator[str]:
    """A load balancer before two servers that answer whole requests."""
    port, workers = free_port(), [serve(*FLAGS), serve(*FLAGS, "--schedule-policy", "lpm")]
    command = [sys.executable, "-m", "radixpd.mini_lb", "--port", str(port), "--worker-urls", *(worker.url for worker in workers)]
    log = Path(os.environ["XDG_CACHE_HOME"]) / f"balancer-{port}.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    until(ready, "the load balancer is ready", seconds=60)
    yield url
    process.terminate()
    process.wait(30)


@pytest.fixture(scope="module")
def group(tiny: Path) -> Iterator[str]:
    """A prefill and a decode server behind their load balancer."""
    server = Server(tiny, *FLAGS, wait=False, module="radixpd.launch_pd")
    until(lambda: server.process.poll() is not None or "radixpd: ready on" in server.log, "the group is ready", seconds=120)
    assert server.process.poll() is None, server.log
    yield server.url
    assert server.close() == 0


@pytest.mark.parametrize("options", [{}, {"hints": False}, {"stream": True}], ids=["hints", "no hints", "stream"])
@pytest.mark.parametrize("way", ["balancer", "group"])
def test_a_program_gives_the_same_variables(way: str, options: Any, expected: list[Any], request: pytest.FixtureRequest) -> None:
    assert variables(request.getfixturevalue(way), **options) == expected


def test_one_server_repeats_itself(expected: list[Any], serve: Callable[..., Server]) -> None:
    assert variables(serve(*FLAGS).url, stream=True) == variables(serve(*FLAGS).url, hints=False) == expected
    assert len(set(expected[1])) == 3, "every branch has a seed of its own"
