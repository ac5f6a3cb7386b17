"""Requests that a prefill and a decode server share: rooms, who decides, and that both legs end on every way out."""

from __future__ import annotations

import asyncio
import logging

import pytest
from aiohttp import web
from mini_lb.lb_stubs import Stub, broken, dying, event, events_of, stream, until

TEXT = event({"text": "x", "meta_info": {"completion_tokens": 1}})
DONE = b"data: [DONE]\n\n"
EMPTY = {"text": "", "output_ids": [], "meta_info": {"completion_tokens": 0}}


class Pair:
    """One prefill and one decode server. By default decode answers once prefill has: the handoff."""

    def __init__(self, prefill: Stub, decode: Stub) -> None:
        self.prefill, self.decode = prefill, decode
        self.handed = asyncio.Event()
        self.prefill.script = self.hand_over
        self.decode.script = self.answer

    async def hand_over(self, request, visit):
        self.handed.set()
        return web.json_response(EMPTY)

    async def answer(self, request, visit):
        await self.handed.wait()
        if visit.body.get("stream"):
            return await stream(request, TEXT, DONE)
        return web.json_response({"text": "whole", "meta_info": {"completion_tokens": 1}})

    @property
    def legs(self) -> list[tuple[int, int]]:
        return [(len(self.prefill.visits), len(self.decode.visits))]

    def ended(self) -> bool:
        return all(visit.end for stub in (self.prefill, self.decode) for visit in stub.visits)


@pytest.fixture
def share(stubs, balance):
    """`await share(*flags)`: a balancer in front of a pair."""

    async def start(*flags):
        pair = Pair(*await stubs("p", "d"))
        lb = await balance("--prefill", pair.prefill.url, "9998", "--decode", pair.decode.url, *flags)
        await lb.up(2)
        return lb, pair

    return start


async def reserved(pair: Pair, count: int = 1) -> None:
    await until(lambda: len(pair.prefill.visits) == len(pair.decode.visits) == count, "both legs have arrived")


# ---- rooms ----------------------------------------------------------------------------------------------------


async def test_both_get_the_same_body_and_one_room(share) -> None:
    lb, pair = await share()
    raw = b'{ "text" : "a", "sampling_params": {"temperature": 0.0} } '
    async with lb.http.post("/generate", data=raw, headers={"X-Request-Id": "r1", "content-type": "application/json"}) as response:
        assert (await response.json())["text"] == "whole"
    (first,), (second,) = pair.prefill.visits, pair.decode.visits
    assert first.raw == second.raw
    assert first.raw.startswith(raw.rstrip()[:-1].rstrip())
    body = first.body
    assert (body["bootstrap_host"], body["bootstrap_port"]) == ("127.0.0.1", 9998)
    assert 0 <= body["bootstrap_room"] < 2**63
    assert {name: body[name] for name in ("text", "sampling_params")} == {"text": "a", "sampling_params": {"temperature": 0.0}}
    assert first.headers["X-Request-Id"] == second.headers["X-Request-Id"] == "r1"


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/generate", {"text": ["a", "b", "c"]}, 3),
        ("/generate", {"text": ["a"]}, 1),
        ("/generate", {"input_ids": [[1, 2], [3]]}, 2),
        ("/generate", {"input_ids": [1, 2, 3]}, None),
        ("/v1/completions", {"prompt": ["a", "b"]}, 2),
        ("/v1/completions", {"prompt": [[1], [2]]}, 2),
        ("/v1/completions", {"prompt": [1, 2]}, None),
        ("/v1/completions", {"prompt": "a", "n": 3}, None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, None),
        ("/generate", {}, None),
    ],
)
async def test_a_batch_gets_a_room_for_each_prompt(share, path, body, count) -> None:
    lb, pair = await share()
    await lb.post(path, body)
    sent = pair.decode.visits[0].body
    assert sent == pair.prefill.visits[0].body
    if count is None:
        assert isinstance(sent["bootstrap_room"], int)
        assert (sent["bootstrap_host"], sent["bootstrap_port"]) == ("127.0.0.1", 9998)
        return
    assert len(set(sent["bootstrap_room"])) == count
    assert (sent["bootstrap_host"], sent["bootstrap_port"]) == (["127.0.0.1"] * count, [9998] * count)


async def test_rooms_never_repeat_and_cannot_be_named(share) -> None:
    lb, pair = await share()
    for _ in range(20):
        await lb.post()
    rooms = {visit.body["bootstrap_room"] for visit in pair.decode.visits}
    assert len(rooms) == 20
    assert max(rooms) > 2**55  # of 20 draws from 63 bits
    for name, value in (("bootstrap_room", 1), ("bootstrap_host", "10.0.0.1"), ("bootstrap_port", 80)):
        assert (await lb.post(body={"text": "a", name: value}, status=400))["error"]["param"] == name
    assert len(pair.decode.visits) == 20


# ---- who decides --------------------------------------------------------------------------------------------------


async def test_decode_streams_while_prefill_still_answers(share) -> None:
    lb, pair = await share()
    release, more = asyncio.Event(), asyncio.Event()

    async def slow(request, visit):
        await release.wait()
        return web.json_response(EMPTY)

    async def answer(request, visit):
        return await stream(request, TEXT, more, DONE)

    pair.prefill.script, pair.decode.script = slow, answer
    async with lb.http.post("/generate", json={"text": "a", "stream": True}) as response:
        assert await response.content.readuntil(b"\n\n") == TEXT
        release.set()
        more.set()
        assert await response.read() == DONE
    await until(lb.idle, "nothing is held")
    assert [visit.end for visit in pair.prefill.visits] == ["answered"]


@pytest.mark.parametrize("status", [400, 401, 429, 500, 504])
async def test_a_prefill_error_before_decode_has_begun_ends_both(share, status) -> None:
    lb, pair = await share()

    async def refuses(request, visit):
        return web.json_response({"error": {"message": "too long", "param": "text"}}, status=status)

    pair.prefill.script = refuses
    answer = await lb.post(status=status)
    assert answer["error"] == {"message": "too long", "param": "text"}
    await until(lambda: pair.decode.visits[0].end == "gone", "decode was told")
    assert pair.legs == [(1, 1)]
    assert lb.idle()


async def test_an_error_of_both_reaches_the_client_once(share) -> None:
    lb, pair = await share()

    async def refuses(request, visit):
        return web.json_response({"error": {"message": "no"}}, status=400)

    pair.prefill.script = pair.decode.script = refuses
    for _ in range(5):
        assert (await lb.post(status=400))["error"]["message"] == "no"
    await until(lb.idle, "nothing is held")
    assert all(worker.state(0.0) == "up" for worker in lb.parts.fleet)


async def test_after_decode_has_begun_prefill_no_longer_matters(share, caplog) -> None:
    lb, pair = await share()
    more, fail = asyncio.Event(), asyncio.Event()

    async def fails(request, visit):
        await fail.wait()
        return broken(request, visit)

    async def answer(request, visit):
        return await stream(request, TEXT, more, TEXT, DONE)

    pair.prefill.script, pair.decode.script = fails, answer
    with caplog.at_level(logging.WARNING):
        async with lb.http.post("/generate", json={"text": "a", "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            fail.set()
            await until(lambda: pair.prefill.visits[0].end == "broken", "the prefill leg has failed")
            more.set()
            assert await response.read() == TEXT + DONE
        await until(lb.idle, "nothing is held")
    assert "the prefill leg failed after decode had begun" in caplog.text
    assert next(worker for worker in lb.parts.fleet if worker.spec.role == "prefill").outcomes["fault"] == 1


async def test_decode_that_refuses_ends_prefill(share) -> None:
    lb, pair = await share()

    async def hangs(request, visit):
        await asyncio.Future()

    async def refuses(request, visit):
        return web.json_response({"error": {"message": "full"}}, status=429)

    pair.prefill.script, pair.decode.script = hangs, refuses
    assert (await lb.post(status=429))["error"]["message"] == "full"
    await until(lambda: pair.prefill.visits[0].end == "gone", "prefill was told")
    await until(lb.idle, "nothing is held")


async def test_rt_12_decode_that_dies_in_mid_stream_is_an_error_event(share) -> None:
    lb, pair = await share()
    die = asyncio.Event()
    pair.decode.script = dying(die, TEXT)
    async with lb.http.post("/generate", json={"text": "a", "stream": True}) as response:
        assert await response.content.readuntil(b"\n\n") == TEXT
        die.set()
        (last,) = events_of(await response.read())
    assert "incomplete" in last["error"]["message"]
    await until(lb.idle, "nothing is held")
    assert len(pair.decode.visits) == 1


async def test_a_decode_server_without_end_of_prefill_is_not_held_up(share) -> None:
    """Decode computed it all itself; prefill never answers."""
    lb, pair = await share()

    async def hangs(request, visit):
        await asyncio.Future()

    pair.prefill.script = hangs
    pair.handed.set()
    assert (await lb.post())["text"] == "whole"
    await until(lambda: pair.prefill.visits[0].end == "gone", "prefill was told")
    await until(lb.idle, "nothing is held")


# ---- what is tried again ---------------------------------------------------------------------------------------------


async def test_without_a_prefill_server_decode_does_it_all(share) -> None:
    lb, pair = await share("--health-failure-threshold", "1000", "--cb-failure-threshold", "1000")
    await pair.prefill.stop()
    pair.handed.set()
    for _ in range(3):
        assert (await lb.post())["text"] == "whole"
    # The second try of each names no room: decode computes the prompt.
    assert "bootstrap_room" not in pair.decode.visits[-1].body
    assert await lb.metric("retries_total", reason="unreached") == 3
    await until(pair.ended, "every leg has ended")


async def test_a_pair_whose_prefill_dies_is_replaced_with_new_rooms(stubs, balance) -> None:
    p1, p2, d = await stubs("p1", "p2", "d")
    pair = Pair(p2, d)
    lb = await balance("--prefill", p1.url, p2.url, "--decode", d.url)
    await lb.up(3)

    async def dies(request, visit):
        await until(lambda: d.visits, "decode has its leg")
        return broken(request, visit)

    p1.script = dies
    assert (await lb.post())["text"] == "whole"
    await reserved_at(d, 2)
    one, two = (visit.body for visit in d.visits)
    assert one["bootstrap_room"] == p1.visits[0].body["bootstrap_room"] != two["bootstrap_room"]
    assert two["bootstrap_room"] == pair.prefill.visits[0].body["bootstrap_room"]
    assert [visit.end for visit in d.visits] == ["gone", "answered"]


async def reserved_at(stub: Stub, count: int) -> None:
    await until(lambda: len(stub.visits) == count and all(visit.end for visit in stub.visits), f"{count} legs have ended")


async def test_a_prefill_server_that_is_full_sends_its_pair_elsewhere(stubs, balance) -> None:
    p1, p2, d = await stubs("p1", "p2", "d")
    Pair(p2, d)

    async def full(request, visit):
        return web.json_response({"error": {"message": "full"}}, status=503)

    p1.script = full
    lb = await balance("--prefill", p1.url, p2.url, "--decode", d.url)
    await lb.up(3)
    for _ in range(4):
        assert (await lb.post())["text"] == "whole"
    assert all(worker.state(0.0) == "up" for worker in lb.parts.fleet)


@pytest.mark.parametrize("busy", ["prefill", "decode"])
async def test_what_a_busy_half_refuses_is_not_put_on_the_other(share, busy) -> None:
    lb, pair = await share()

    async def full(request, visit):
        return web.json_response({"error": {"message": "full"}}, status=503)

    async def hangs(request, visit):
        await asyncio.Future()

    pair.prefill.script, pair.decode.script = (full, hangs) if busy == "prefill" else (hangs, full)
    assert (await lb.post(status=503))["error"]["message"] == "full"
    assert pair.legs == [(1, 1)]
    await until(lb.idle, "nothing is held")


# ---- ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_hangs_up_ends_both_legs(share, streaming, begun) -> None:
    lb, pair = await share()

    async def hangs(request, visit):
        await asyncio.Future()

    async def endless(request, visit):
        return await stream(request, TEXT, asyncio.Event())

    pair.prefill.script = hangs
    pair.decode.script = endless if begun else hangs
    body = {"text": "a", "stream": streaming}
    task = asyncio.create_task(lb.events(body=body) if streaming else lb.post(body=body))
    await reserved(pair)
    if begun and streaming:
        await until(lambda: not lb.idle(), "it runs")
    task.cancel()
    await until(pair.ended, "both were told")
    assert [visit.end for visit in (*pair.prefill.visits, *pair.decode.visits)] == ["gone", "gone"]
    await until(lb.idle, "nothing is held")
    assert all(worker.outcomes["fault"] == 0 for worker in lb.parts.fleet)


async def test_a_deadline_ends_both_legs(share) -> None:
    lb, pair = await share("--request-timeout", "0.2")

    async def hangs(request, visit):
        await asyncio.Future()

    pair.prefill.script = pair.decode.script = hangs
    assert (await lb.post(status=504))["error"]["code"] == "deadline_exceeded"
    await until(pair.ended, "both were told")
    await until(lb.idle, "nothing is held")


async def test_connections_are_kept_when_nothing_breaks(share) -> None:
    """A prefill leg that is answered is read to its end: its connection serves the next request."""
    lb, pair = await share()
    ports = set()

    async def hand_over(request, visit):
        ports.add(request.transport.get_extra_info("peername")[1])
        return await pair.hand_over(request, visit)

    pair.prefill.script = hand_over
    for _ in range(10):
        await lb.post()
    assert len(ports) <= 2  # the looks at health have one too
