"""What a prefill/decode pair refuses or cannot do: each ends with one clear error at the client, or with an answer computed by decode.

Each test names the case of the project's list of field reports that it stands for.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from e2e.asks import GREEDY
from e2e.pd import Pair, phases
from e2e.pd_prompts import ids
from e2e.reference import solo
from e2e.servers import Answer, Server, free_port, together

FAIL = ("--disaggregation-fallback", "fail")
WAIT = 3  # seconds that prefill waits for the other half of a request
BRIEF = ("--disaggregation-bootstrap-timeout", str(WAIT))


def native(prompt: list[int], tokens: int = 6) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": {**GREEDY, "max_new_tokens": tokens}}


def message_of(answer: Answer, status: int) -> str:
    assert answer.status == status, answer.body
    return str(answer.json["error"]["message"])


@pytest.fixture
def strict(pair: Callable[..., Pair]) -> Pair:
    """What prefill does not deliver fails; prefill waits only briefly."""
    return pair(prefill=BRIEF, decode=FAIL)


# ---- bodies ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("short", ["both", "prefill", "decode"])
def test_pd_03_a_prompt_over_the_limit_is_refused_and_nothing_is_generated(pair: Callable[..., Pair], short: str, stream: bool) -> None:
    length = ("--context-length", "256")
    prefill, decode = (length if short in (name, "both") else () for name in ("prefill", "decode"))
    both = pair(prefill=prefill, decode=(*decode, *FAIL))
    before = [server.metric("generation_tokens") for server in both.both]
    began = time.monotonic()
    legs = both.legs("/generate", {**native(ids(1, 300)), "stream": stream})
    for answer in legs:
        assert "256" in message_of(answer, 400)
    assert time.monotonic() - began < 5, "at once, not after a deadline"
    both.settled()
    assert [server.metric("generation_tokens") for server in both.both] == before


def test_pd_03_what_only_decode_can_hold_is_computed_there(pair: Callable[..., Pair], server: Server) -> None:
    both = pair(prefill=("--context-length", "256"))
    body = native(ids(2, 300))
    expected = solo(server, body)[0]
    first, second = both.legs("/generate", body)
    message_of(first, 400)
    assert second.status == 200, second.body
    expected.check(second.json)
    both.settled()


def test_pd_08_two_requests_with_one_room_are_never_mixed(strict: Pair, server: Server) -> None:
    bodies = [native(ids(10 + index, 100)) for index in range(2)]
    expected = [solo(server, body)[0] for body in bodies]

    def check(answer: Answer, which: int) -> None:
        if answer.status == 200:
            expected[which].check(answer.json)
        else:
            assert "room" in answer.json["error"]["message"]
            assert answer.status < 500 or answer.status in (502, 504), answer.body

    for _ in range(4):
        named = [{**body, **strict.room()} for body in bodies]
        named[1] |= {"bootstrap_room": named[0]["bootstrap_room"]}
        found = together([lambda body=body: strict.legs("/generate", body) for body in named])
        for which, (_, answer) in enumerate(found):
            check(answer, which)
        check(strict.legs("/generate", named[1])[1], 1)  # and in turn
        strict.settled()


def test_pd_08_a_room_whose_halves_ask_for_different_prompts_fails(strict: Pair) -> None:
    room = strict.room()
    bodies = [{**native(ids(20 + index, 100)), **room} for index in range(2)]
    first, second = together([lambda leg=leg: leg[0].post("/generate", leg[1]) for leg in zip(strict.both, bodies)])
    assert "differs" in message_of(first, 400)
    assert "differs" in message_of(second, 400)
    strict.settled()


# ---- servers that do not fit ----------------------------------------------------------------------------------------------------


def test_pd_09_other_page_sizes_are_refused_naming_both(pair: Callable[..., Pair], server: Server) -> None:
    sizes = {"prefill": ("--page-size", "16", *BRIEF), "decode": ("--page-size", "32")}
    strict = pair(prefill=sizes["prefill"], decode=(*sizes["decode"], *FAIL))
    began = time.monotonic()
    first, second = strict.legs("/generate", native(ids(30, 100)))
    assert "page size 16 there, 32 here" in message_of(second, 502)
    assert "page size 32 there, 16 here" in strict.prefill.log
    assert time.monotonic() - began < 10
    assert first.status == 504
    strict.settled()


def test_pd_09_a_decode_server_that_does_not_fit_still_answers(pair: Callable[..., Pair], server: Server) -> None:
    lenient = pair(prefill=("--page-size", "16", *BRIEF), decode=("--page-size", "32"))
    body = native(ids(31, 100))
    expected = solo(server, body)[0]
    expected.check(lenient.legs("/generate", body)[1].json)
    assert "page size 16 there, 32 here" in lenient.decode.log
    lenient.settled()


def test_pd_10_other_tensor_parallel_sizes_are_refused_at_start(tiny: Path) -> None:
    process = Server(tiny, "--disaggregation-mode", "decode", "--tp-size", "2", wait=False)
    assert process.process.wait(60) == 2
    assert "--tp-size 2: it must be 1" in process.log


@pytest.mark.parametrize("fallback", ["local", "fail"])
def test_pd_11_a_transfer_that_cannot_be_made_is_told(pair: Callable[..., Pair], server: Server, fallback: str) -> None:
    backend = "--disaggregation-transfer-backend"
    apart = pair(prefill=(backend, "tcp"), decode=(backend, "shm", "--disaggregation-fallback", fallback))
    body = native(ids(40, 100))
    expected = solo(server, body)[0]
    began = time.monotonic()
    first, second = apart.legs("/generate", body)
    assert time.monotonic() - began < 10
    assert "cannot be written to" in message_of(first, 502)
    if fallback == "local":
        expected.check(second.json)
    else:
        assert "cannot be written to" in message_of(second, 502)
    apart.settled()


# ---- one half alone -------------------------------------------------------------------------------------------------------------


def test_pd_19_pd_20_a_prompt_that_nobody_decodes_is_dropped(strict: Pair) -> None:
    before = strict.prefill.settled()
    began = time.monotonic()
    text = message_of(strict.prefill.post("/generate", strict.named(native(ids(50, 500)))), 504)
    assert WAIT - 0.5 < time.monotonic() - began < WAIT + 5
    # Phase, limit, option.
    for word in ("reserved", f"within {WAIT} s", "--disaggregation-bootstrap-timeout"):
        assert word in text
    assert strict.prefill.settled() == before


def test_pd_20_a_room_that_prefill_never_hears_of_ends_with_prefills_words(strict: Pair) -> None:
    text = message_of(strict.decode.post("/generate", strict.named(native(ids(51, 500)))), 504)
    for word in ("no request came", f"within {WAIT} s", "--disaggregation-bootstrap-timeout"):
        assert word in text
    strict.settled()


def test_pd_20_a_prefill_server_that_is_not_there_is_named(strict: Pair) -> None:
    port = free_port()
    body = {**strict.named(native(ids(52, 500))), "bootstrap_port": port}
    text = message_of(strict.decode.post("/generate", body), 502)
    for word in (f"127.0.0.1:{port}", "could not be reached within", " s", "--disaggregation-bootstrap-port"):
        assert word in text
    strict.decode.settled()


# ---- strangers ------------------------------------------------------------------------------------------------------------------


def test_se_05_strangers_at_the_bootstrap_port_change_nothing(
    pair: Callable[..., Pair], tiny: Path, tmp_path: Path, server: Server
) -> None:
    secrets = [tmp_path / name for name in ("ours", "theirs")]
    for path in secrets:
        path.write_text(f"the secret of {path.name}, long enough\n")
        path.chmod(0o600)
    ours = pair("--disaggregation-secret-file", str(secrets[0]), decode=FAIL)
    body = native(ids(60, 100))
    expected = solo(server, body)[0]
    expected.check(ours.generate(**body))

    # A service that speaks HTTP would be asked like this.
    with socket.create_connection(("127.0.0.1", ours.bootstrap_port), 10) as connection:
        connection.sendall(b"PUT /route HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        connection.shutdown(socket.SHUT_WR)
        told = b""
        while piece := connection.recv(4096):
            told += piece
    assert b"HTTP" not in told
    _send_frames(ours.bootstrap_port)
    # A whole decode server with another secret.
    other = Server(tiny, "--disaggregation-mode", "decode", "--disaggregation-secret-file", str(secrets[1]), *FAIL)
    try:
        answer = other.post("/generate", ours.named(body))
        assert answer.status in (502, 504), answer.body
        assert "secret" in answer.json["error"]["message"]
    finally:
        assert other.close() == 0
    ours.flush()
    expected.check(ours.generate(**body))
    assert not phases(ours.prefill)
    assert "frames from peers that changed nothing" in ours.prefill.log
    for path in secrets:
        for log in (ours.prefill.log, ours.decode.log, other.log):
            assert path.read_text().strip() not in log


def _send_frames(port: int) -> None:
    """Frames that look like the protocol's, without a proof."""
    context: zmq.Context[Any] = zmq.Context()
    try:
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 5000)
        stranger.connect(f"tcp://127.0.0.1:{port}")
        for kind in ("Reserve", "Sealed", "Confirm", "PeerAbort"):
            stranger.send(msgspec.msgpack.encode([kind, 1, b"x" * 16, 1, 1, 1, b"", b"m" * 32]))
        stranger.send(b"\x00garbage")
        stranger.close()
    finally:
        context.term()
