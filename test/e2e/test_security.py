"""Nothing runs that should not, nothing listens that should not, no secret is shown.

Each test names the case of the project's list of field reports that it stands for; the default server must be alive after each.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e.asks import body_for, refused
from e2e.servers import Server

pytestmark = pytest.mark.usefixtures("alive")
SECRET = "sk-very-secret-K"
PACKAGE = Path(__file__).parents[2] / "radixpd"


class Bomb:
    """Unpickling this writes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.path}",))


def processes(server: Server) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in (server.process.pid, *server.children().values())]


def test_se_01_bombs_and_noise_do_nothing(server: Server, tmp_path: Path) -> None:
    trace = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(str(trace)))
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)  # ZMTP, as a ZMQ peer starts
    for port in {c.laddr.port for process in processes(server) for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}:
        for payload in (bomb, os.urandom(4096), greeting + bomb, b"GET " + b"x" * 100_000):
            with socket.create_connection(("127.0.0.1", port), 5) as connection:
                connection.sendall(payload)
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(10)
                try:
                    while connection.recv(65536):
                        pass
                except ConnectionError:
                    continue
    refused(server, "/generate", {"text": "a", "custom_logit_processor": bomb.hex()})
    assert not trace.exists()


def test_se_01_no_pickle_in_the_source() -> None:
    forbidden = re.compile(
        r"^\s*(import|from)\s+(pickle|cPickle|dill|cloudpickle|marshal|shelve)\b|\b(recv|send)_pyobj\b|torch\.load\b", re.MULTILINE
    )
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 50
    assert [str(file) for file in files if forbidden.search(file.read_text())] == []


def test_se_02_listeners_are_loopback_and_sockets_are_private(server: Server) -> None:
    listeners = [
        c
        for process in processes(server)
        for c in process.net_connections("inet")
        if c.status == psutil.CONN_LISTEN or c.type == socket.SOCK_DGRAM
    ]
    assert {(c.laddr.ip, c.laddr.port) for c in listeners} == {("127.0.0.1", server.port)}
    paths = {
        Path(c.laddr) for process in processes(server) for c in process.net_connections("unix") if c.laddr and c.status == psutil.CONN_NONE
    }
    bound = {path for path in paths if path.is_socket()}
    assert len(bound) >= 3
    for path in bound:
        assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.fixture(scope="module")
def locked(serve: Callable[..., Server]) -> Server:
    """A server with an API key."""
    return serve("--api-key", SECRET, "--threads", "1", "--log-level", "debug", "--log-requests")


def test_se_03_every_route_needs_the_key(locked: Server) -> None:
    good = {"Authorization": f"Bearer {SECRET}"}
    listed = locked.get("/openapi.json", headers=good).json["paths"]
    routes = [(method.upper(), re.sub(r"{[^}]*}", "x", path)) for path, methods in listed.items() for method in methods]
    assert len(routes) > 30
    for method, path in [*routes, ("GET", "/unknown"), ("POST", "/health_generate"), ("GET", "/health/"), ("OPTIONS", "/generate")]:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": SECRET}, {"Authorization": f"Basic {SECRET}"}):
            answer = locked.request(method, path, {} if method != "GET" else None, headers=headers)
            if path == "/health":
                assert answer.status == 200
            else:
                assert answer.status == 401, (method, path)
                assert answer.json["error"]["code"] == "invalid_api_key"
    assert locked.post("/generate", body_for("/generate"), headers=good).status == 200
    assert locked.get("/v1/models", headers=good).status == 200


def test_se_04_secrets_are_never_shown(locked: Server) -> None:
    good = {"Authorization": f"Bearer {SECRET}"}
    locked.post("/generate", {**body_for("/generate"), "temperature": "bad"}, headers=good)
    shown = [locked.get(path, headers=good).body.decode() for path in ("/server_info", "/metrics", "/get_model_info", "/v1/models")]
    assert all(shown)
    assert not any(SECRET in text for text in [*shown, locked.log])
    for pid in locked.children().values():
        assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


def test_se_08_huge_headers_are_refused(server: Server) -> None:
    for headers in ("".join(f"X-{i}: 1\r\n" for i in range(10_000)), "X: " + "y" * 2**20 + "\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
            connection.sendall(f"GET /health HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.0 431")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 431


def test_se_09_nothing_is_fetched(server: Server) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        part = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"}}
        refused(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1})
        with pytest.raises(BlockingIOError):
            listener.accept()
