"""Requests that many end-to-end tests send: bodies of each route, texts, refusals, bytes that are no HTTP library's.

Every function takes the `Server` to talk to; `refused` is the one place that says what a good refusal looks like.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from e2e.servers import ASCII_BIAS, Server

__all__ = ["CHAT", "GREEDY", "ROUTES", "body_for", "chat", "letters", "raw_post", "raw_stream", "refused", "text_of"]

GREEDY = {"temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")


def body_for(route: str, **sampling: Any) -> dict[str, Any]:
    """A valid body of a route with these sampling fields under their native names."""
    if route == "/generate":
        return {"text": "hello", "sampling_params": {"max_new_tokens": 4, **sampling}}
    if "max_new_tokens" in sampling:
        sampling["max_tokens"] = sampling.pop("max_new_tokens")
    base = CHAT if route == "/v1/chat/completions" else {"prompt": "hello"}
    return {"model": "tiny", **base, "max_tokens": 4, **sampling}


def text_of(server: Server, **sampling: Any) -> str:
    """The text of one short prompt."""
    return str(server.generate(text="once upon", sampling_params={"ignore_eos": True, "max_new_tokens": 32, **sampling})["text"])


def refused(server: Server, route: str, body: dict[str, Any], *words: str) -> dict[str, Any]:
    """The error of a request that must be refused with 4xx; `words` must stand in its message."""
    answer = server.post(route, body)
    assert 400 <= answer.status < 500, (route, body, answer.status, answer.body[:300])
    assert answer.headers["Content-Type"].startswith("application/json")
    error: dict[str, Any] = answer.json["error"]
    assert isinstance(error["message"], str)
    assert "Traceback" not in error["message"]
    for word in words:
        assert word in error["message"]
    return error


def letters(server: Server, **sampling: Any) -> dict[str, Any]:
    """A greedy answer of printable ASCII, one character a token."""
    wish = {**GREEDY, "max_new_tokens": 40, "logit_bias": ASCII_BIAS, **sampling}
    return server.generate(text="letters", sampling_params=wish)  # type: ignore[no-any-return]


def chat(server: Server, messages: list[dict[str, Any]], **fields: Any) -> Any:
    """A short greedy chat; the whole answer."""
    return server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields})


def raw_post(server: Server, route: str, raw: bytes) -> bytes:
    """The beginning of the answer to a body that need not be JSON."""
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(head.encode() + raw)
        return connection.recv(4096)


def raw_stream(server: Server, tokens: int) -> socket.socket:
    """A connection with a running stream, for a client that will vanish."""
    raw = json.dumps({"text": f"raw {tokens}", "stream": True, "sampling_params": {**GREEDY, "max_new_tokens": tokens}})
    connection = socket.create_connection(("127.0.0.1", server.port), 30)
    connection.sendall(
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n{raw}".encode()
    )
    assert b"data: " in connection.recv(65536) + connection.recv(65536)
    return connection
