"""A prefill and a decode server as a router of P/D groups uses them: the same body to both, with the room where the prompt is handed over.

A `Pair` answers like a `Server`, so that a test can ask either; what it returns is what the decode server says, and the prefill server's
leg must end well too. `legs` shows both answers, `open_leg` gives raw connections that a test may cut. Every wait has a deadline. Used by
the tests of prefill/decode.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from e2e.servers import START_DEADLINE, Answer, Server, free_port, together, until

__all__ = ["Front", "Pair", "hang_up", "open_leg", "phases"]

LEG_DEADLINE = 30.0  # seconds that the prefill leg may take longer than the decode leg
ROOMS = 2**63
RESET = b"\x01\0\0\0\0\0\0\0"  # linger of 0 s: closing sends RST, no goodbye


class Pair:
    """Two running servers. `bootstrap_port`: where the first one's scheduler listens for the second's."""

    def __init__(self, prefill: Server, decode: Server, bootstrap_port: int) -> None:
        self.prefill = prefill
        self.decode = decode
        self.bootstrap_port = bootstrap_port

    @classmethod
    def start(
        cls,
        model: str | Path,
        *flags: str,
        prefill: tuple[str, ...] = (),
        decode: tuple[str, ...] = (),
        wait: bool = True,
        **environment: str,
    ) -> Pair:
        """Start both at once: `flags` for both, and those of each."""
        port = free_port()
        pair = cls(
            Server(
                model,
                *("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port)),
                *flags,
                *prefill,
                wait=False,
                **environment,
            ),
            Server(model, "--disaggregation-mode", "decode", *flags, *decode, wait=False, **environment),
            port,
        )
        if wait:
            pair.wait_ready()
        return pair

    @property
    def both(self) -> tuple[Server, Server]:
        """Prefill, decode."""
        return self.prefill, self.decode

    def wait_ready(self) -> None:
        """Until both are."""
        for server in self.both:
            server.wait_ready()

    # ---- bodies ---------------------------------------------------------------------------------------------------------------

    def room(self) -> dict[str, Any]:
        """The three fields with a room of its own."""
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap_port, "bootstrap_room": secrets.randbelow(ROOMS)}

    def named(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body with a room for each of its prompts, unless it names some."""
        if "bootstrap_room" in body:
            return body
        texts = next((body[name] for name in ("text", "input_ids", "prompt") if name in body), "")
        if isinstance(texts, str) or not texts or isinstance(texts[0], int):
            return {**body, **self.room()}
        rooms = [self.room() for _ in texts]
        return {**body, **{name: [room[name] for room in rooms] for name in rooms[0]}}

    # ---- asking ---------------------------------------------------------------------------------------------------------------

    def legs(self, path: str, body: dict[str, Any], *, timeout: float = 120) -> tuple[Answer, Answer]:
        """The answers of both servers, prefill's first."""
        body = self.named(body)
        first, second = together([lambda server=server: server.post(path, body, timeout=timeout) for server in self.both])
        return first, second

    def post(self, path: str, body: Any = None, *, timeout: float = 120) -> Answer:
        """What a client gets: decode's answer. Prefill must not fail where decode did not."""
        first, second = self.legs(path, body or {}, timeout=timeout)
        assert second.status != 200 or first.status == 200, first.body
        return second

    def generate(self, **body: Any) -> Any:
        """POST /generate, which must succeed."""
        answer = self.post("/generate", body)
        assert answer.status == 200, answer.body
        return answer.json

    def chat(self, messages: list[dict[str, Any]], **fields: Any) -> Any:
        """A greedy chat, which must succeed."""
        answer = self.post("/v1/chat/completions", {"messages": messages, "temperature": 0, **fields})
        assert answer.status == 200, answer.body
        return answer.json

    def stream(self, path: str, body: dict[str, Any], *, timeout: float = 120) -> Iterator[Any]:
        """Events of the decode server, up to `[DONE]` or an error event. If decode ends well prefill must."""
        body = self.named(body)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(self.prefill.post, path, {**body, "stream": True}, timeout=timeout)
            event: Any = {}
            for event in self.decode.stream(path, body, timeout=timeout):
                yield event
            answer = other.result(LEG_DEADLINE)
            assert "error" in event or answer.status == 200, answer.body
            assert "error" in event or answer.body.endswith(b"data: [DONE]\n\n"), answer.body

    # ---- both servers ---------------------------------------------------------------------------------------------------------

    def settled(self) -> tuple[dict[str, float], dict[str, float]]:
        """Wait until neither server has anything to do; their pages by owner then."""
        return self.prefill.settled(), self.decode.settled()

    def flush(self) -> None:
        """Empty both caches."""
        for server in self.both:
            server.flush()

    def close(self) -> int:
        """0 if both end well."""
        for server in self.both:
            if server.process.poll() is None:
                server.terminate()
        return max(*(server.close() for server in self.both))


class Front(Server):
    """Another program in front of servers, asked as a server is. `probe`: the path that answers 200 once it knows them."""

    def __init__(self, command: list[str], port: int, *, probe: str) -> None:
        self.port = port
        self.told = False
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = Path(os.environ["XDG_CACHE_HOME"]) / f"front-{port}.log"
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[2], start_new_session=True
            )
        until(lambda: self._is_ready(probe), "it is ready", seconds=START_DEADLINE)

    @classmethod
    def mini_lb(cls, pair: Pair, *flags: str) -> Front:
        """Our own load balancer."""
        port = free_port()
        prefill = ("--prefill", pair.prefill.url, str(pair.bootstrap_port))
        command = [sys.executable, "-m", "radixpd.mini_lb", "--port", str(port), *prefill, "--decode", pair.decode.url, *flags]
        return cls(command, port, probe="/health")

    def _is_ready(self, probe: str) -> bool:
        assert self.process.poll() is None, self.log
        try:
            return self.get(probe, timeout=5).status == 200
        except OSError:
            return False


def phases(server: Server) -> list[str]:
    """What each request of a server is in, by its scheduler's word, sorted."""
    return sorted(each["phase"] for each in server.server_info()["internal_states"][0]["requests"] if each["rid"] is not None)


def open_leg(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which a whole request has been sent, and nothing read."""
    raw = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), LEG_DEADLINE)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


def hang_up(connection: socket.socket) -> None:
    """Vanish without a goodbye."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    connection.close()
