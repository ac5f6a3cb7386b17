"""Mutated bytes on the port: whatever a client sends, the answer has our shape or none, and the log has no trace of ours.

Each connection sends a few requests, valid ones with bytes changed, cut out, put in; reads, half-closes, closes or resets. Seeds are fixed.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import socket
from collections.abc import Callable

import pytest
from e2e.servers import Server, together

BODIES = [
    {"text": "hi", "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}},
    {"text": ["a", "b"], "stream": True, "rid": ["x", "y"], "sampling_params": {"max_new_tokens": 20, "n": 3}},
    {"prompt": "a", "max_tokens": 3, "stream": True},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    {},
]
PATHS = ["/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/abort_request", "/health", "/nothing", "/flush_cache"]
SOMETIMES = [
    b"Expect: 100-continue", b"Origin: https://a", b"X-Request-Id: r", b"Connection: close", b"Upgrade: websocket", b"Content-Encoding: br",
    b"Expect: more", b"Content-Length: 7",
]  # fmt: skip


def request(rng: random.Random) -> bytes:
    body = json.dumps(rng.choice(BODIES)).encode()
    head = [b"Host: x", b"Content-Type: application/json", rng.choice([b"Authorization: Bearer k", b"Authorization: Bearer wrong"])]
    head += [line for line in SOMETIMES if rng.random() < 0.08]
    if (shape := rng.random()) < 0.2:
        head.append(b"Transfer-Encoding: chunked")
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    else:
        if shape < 0.3:
            head.append(b"Content-Encoding: gzip")
            body = gzip.compress(body)
        head.append(b"Content-Length: %d" % (len(body) + rng.choice([0, 0, 0, 3, -1])))
    rng.shuffle(head)
    line = f"{rng.choice(['POST', 'POST', 'GET', 'PUT', 'OPTIONS', 'HEAD'])} {rng.choice(PATHS)} HTTP/1.{rng.choice('1110')}"
    return b"\r\n".join([line.encode(), *head, b"", body])


def mutated(rng: random.Random, raw: bytes) -> bytes:
    for _ in range(rng.choice([0, 0, 1, 1, 2, 5])):
        at = rng.randrange(len(raw) + 1)
        piece = rng.choice([bytes([rng.randrange(256)]), rng.randbytes(9), b"\r\n", b"A" * 9000, b""])
        raw = raw[:at] + piece + raw[at + rng.choice([0, 1, 1, 15]) :]
    return raw


def send(server: Server, rng: random.Random) -> bytes:
    """What came back for a few mutated requests; nothing where the client went away first."""
    raw, got = b"".join(mutated(rng, request(rng)) for _ in range(rng.choice([1, 1, 2, 40]))), b""
    with socket.create_connection(("127.0.0.1", server.port), 10) as client:
        client.settimeout(0.3)
        try:
            client.sendall(raw)
            how = rng.choice(["read", "read", "half-close", "reset", "close"])
            if how == "half-close":
                client.shutdown(socket.SHUT_WR)
            if how == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            while how in ("read", "half-close") and (piece := client.recv(65536)):
                got += piece
        except OSError:
            pass  # closed by the server, or nothing more within the time
    return got


@pytest.fixture(scope="module")
def target(serve: Callable[..., Server]) -> Server:
    """Every guard is on, and a place that is not given back is soon missed."""
    return serve(
        "--api-key", "k", "--salt-from-key", "--max-concurrent-requests", "12", "--max-queued-requests", "8", "--request-timeout", "3",
        "--body-timeout", "1", "--allowed-origins", "https://a",
    )  # fmt: skip


def test_mutated_bytes_are_answered_in_shape_and_leave_no_trace(target: Server) -> None:
    def client(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            got = send(target, rng)
            assert not got or got.startswith(b"HTTP/1.")
            assert b"text/plain" not in got
            assert b"aiohttp" not in got
            for found in re.findall(rb'\{"error":.*?\}\}', got):
                assert set(json.loads(found)["error"]) == {"message", "type", "param", "code"}

    together([lambda seed=seed: client(seed) for seed in range(8)])
    good = {"Authorization": "Bearer k"}
    for _ in range(13):
        assert target.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}}, headers=good).status == 200
    assert "Traceback" not in target.log
    assert " ERROR " not in target.log
