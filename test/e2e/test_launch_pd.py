"""A whole prefill/decode group as one command: what clients get through its load balancer, and how it starts, ends and fails.

The group of the module is shared by the tests that leave it as it was; those that hurt one start their own.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e.pd_prompts import COUNT, Case, threads
from e2e.processes import session_members
from e2e.servers import Server, together, until

FLAGS = ("--dtype", "float32", "--max-total-tokens", "4096")
KEY = "sk-group-key-7"
LONG = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 200}


def group(model: Path, *flags: str, **environment: str) -> Server:
    """A started group, ready."""
    server = Server(model, *FLAGS, *flags, wait=False, module="radixpd.launch_pd", **environment)
    until(lambda: server.process.poll() is not None or "radixpd: ready on" in server.log, "the group is ready", seconds=120)
    assert server.process.poll() is None, server.log
    return server


@pytest.fixture(scope="module")
def shared(tiny: Path) -> Iterator[Server]:
    server = group(tiny, "--prefill", "2", "--decode", "1")
    yield server
    assert server.close() == 0
    assert not session_members(server.process.pid)


@pytest.fixture
def lonely(tiny: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A group of its own, with a short TMPDIR; the parameter is more flags."""
    server = group(tiny, *getattr(request, "param", ()))
    yield server
    if server.process.poll() is None:
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def workers(server: Server, **options: Any) -> list[dict[str, Any]]:
    return server.get("/workers", **options).json["workers"]


def idle(server: Server) -> bool:
    return all(worker["open_requests"] == 0 for worker in workers(server))


def launched(server: Server, module: str) -> dict[str, int]:
    """Command line -> process id of the group's processes that run this module."""
    return {line: pid for pid, line in session_members(server.process.pid).items() if f"-m {module} " in line}


def gone(server: Server) -> bool:
    return not session_members(server.process.pid)


def ask(server: Server, case: Case) -> None:
    if case.stream:
        found = list(server.stream(case.route, case.body))[-1]
    else:
        answer = server.post(case.route, case.body)
        assert answer.status == 200, (case.name, answer.body)
        found = answer.json
    case.check(found)


def test_pd_answers_are_those_of_one_server(server: Server, shared: Server) -> None:
    """Sixty mixed requests at once, through load balancer, prefill and decode servers."""
    cases = threads(server)
    assert sum(map(len, cases)) == COUNT

    def run(thread: list[Case]) -> None:
        for case in thread:
            ask(shared, case)

    for _ in ("cold", "warm"):
        together([lambda thread=thread: run(thread) for thread in cases])
    until(lambda: idle(shared), "nothing is open")
    prefills = [worker for worker in workers(shared) if worker["role"] == "prefill"]
    ended = shared.get("/metrics").body.decode()
    for worker in prefills:
        ok = re.search(rf'worker_requests_total{{outcome="ok",role="prefill",worker="{worker["url"]}"}} (\d+)', ended)
        assert ok, ended
        assert int(ok[1]) >= COUNT // 2  # both had their turns


def test_a_prompt_is_computed_by_prefill(shared: Server) -> None:
    long = "a prompt that nobody has sent before, too long for a decode server to compute. " * 16
    answer = shared.generate(text=long, sampling_params={"max_new_tokens": 4})
    journey = answer["meta_info"]["kv_journey"]
    assert journey["prefill_computed_tokens"] == answer["meta_info"]["prompt_tokens"]
    assert (journey["local_computed_tokens"], journey["fallback"], journey["leg"]) == (0, "", "decode")


def test_the_balancer_knows_what_each_server_has(shared: Server) -> None:
    until(lambda: all(worker["cache_known"] for worker in workers(shared)), "every server's events are heard")
    body = {"text": "all that was said before, and nothing else. " * 8, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    shared.generate(**body)

    def found_again() -> bool:
        answer = shared.post("/generate", body)
        hits = shared.get(f"/explain?rid={answer.headers['X-Request-Id']}").json["tries"][0]["candidates"][0]
        seen = [hits["hits"], hits["decode_hits"]]
        return any(each["exact"] and each["device"] == 336 for each in seen)  # of 352: the last token is computed

    until(found_again, "a prompt is expected where it lies")


def test_a_client_that_hangs_up_leaves_nothing_running(shared: Server) -> None:
    events = shared.stream("/generate", {"text": "a long answer", "sampling_params": {**LONG, "max_new_tokens": 3000}})
    next(events)
    assert not idle(shared)
    events.close()
    until(lambda: idle(shared), "the load balancer has let go")
    until(lambda: all(worker["load"]["running"] == 0 for worker in workers(shared)), "the servers have stopped")


def test_a_bad_request_is_answered_once(shared: Server) -> None:
    answer = shared.post("/generate", {"text": "a", "sampling_params": {"temperature": -1}})
    assert answer.status == 400
    assert answer.json["error"]["param"] == "temperature"
    until(lambda: idle(shared), "nothing is open")
    assert {worker["state"] for worker in workers(shared)} == {"up"}


def test_other_routes(shared: Server) -> None:
    assert shared.get("/v1/models").json["data"]
    assert shared.get("/health_generate").status == 200
    assert shared.post("/tokenize", {"text": "abc"}).json["count"] == 3
    assert [each["status"] for each in shared.post("/flush_cache").json["workers"]] == [200, 200, 200]


def test_lines_have_names_and_listeners_are_loopback(shared: Server) -> None:
    lines = shared.log.splitlines()
    for name in ("prefill-0", "prefill-1", "decode-0", "lb"):
        assert any(line.startswith(f"[{name}] ") for line in lines)
    assert [line for line in lines if "ready on" in line] == [f"radixpd: ready on {shared.url} (2 prefill, 1 decode)"]
    members = [psutil.Process(pid) for pid in session_members(shared.process.pid)]
    listening = [each for member in members for each in member.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    assert listening
    assert {each.laddr.ip for each in listening} == {"127.0.0.1"}


@pytest.mark.parametrize("lonely", [("--api-key", KEY)], indirect=True)
def test_an_open_stream_survives_sigterm(lonely: Server) -> None:
    """Keys reach every part, the secret shows nowhere, and the drain ends all with 0."""
    headers = {"Authorization": f"Bearer {KEY}"}
    assert lonely.get("/health").status == 200
    assert lonely.post("/generate", {"text": "a"}).status == 401
    assert {worker["state"] for worker in workers(lonely, headers=headers)} == {"up"}
    assert all(worker["load"]["kv_tokens"] == 4096 for worker in workers(lonely, headers=headers))
    direct = workers(lonely, headers=headers)[1]["url"]
    environment = psutil.Process(next(iter(launched(lonely, "radixpd.launch_server").values()))).environ()
    balancer = psutil.Process(next(iter(launched(lonely, "radixpd.mini_lb").values())))
    secret = environment["RADIXPD_DISAGGREGATION_SECRET"]
    assert len(secret) == 64
    assert secret not in lonely.log
    assert not any(secret in line for line in session_members(lonely.process.pid).values())
    assert "RADIXPD_DISAGGREGATION_SECRET" not in balancer.environ()
    assert KEY not in " ".join(balancer.cmdline())
    file = Path(balancer.cmdline()[-1])
    assert file.stat().st_mode & 0o777 == 0o600

    host, port = lonely.url.removeprefix("http://").split(":")
    body = b'{"text": "q", "stream": true, "sampling_params": {"max_new_tokens": 200, "ignore_eos": true}}'
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        got = connection.recv(65536)
        assert b" 200 OK" in got
        lonely.terminate()
        while b"[DONE]" not in got:
            more = connection.recv(65536)
            assert more, got
            got += more
    assert b'"error"' not in got
    assert lonely.close(deadline=60) == 0
    assert gone(lonely)
    assert not file.exists()
    with pytest.raises(OSError):
        socket.create_connection((direct.removeprefix("http://").split(":")[0], int(direct.rsplit(":", 1)[1])), timeout=5).close()


@pytest.mark.full
@pytest.mark.parametrize("module", ["radixpd.launch_server", "radixpd.mini_lb"])
def test_a_part_that_dies_ends_the_group(lonely: Server, module: str) -> None:
    os.kill(next(iter(launched(lonely, module).values())), signal.SIGKILL)
    assert lonely.process.wait(30) == 1
    assert re.search(r"(prefill-0|decode-0|lb) was killed by signal 9 .*; ending the others", lonely.log)
    until(lambda: gone(lonely), "nobody is left")


@pytest.mark.full
def test_kill_minus_nine_leaves_no_orphan(lonely: Server) -> None:
    assert len(session_members(lonely.process.pid)) >= 10  # the command, the balancer, two servers of four processes
    lonely.process.kill()
    lonely.process.wait()
    until(lambda: gone(lonely), "nobody is left")


def test_a_port_that_is_taken_is_one_clear_line(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Server(tiny, *FLAGS, wait=False, module="radixpd.launch_pd", port=port)
        assert server.process.wait(60) == 2
    assert f"[lb] radixpd: error: port {port} on 127.0.0.1 is in use" in server.log
    assert gone(server)
