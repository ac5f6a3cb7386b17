"""A change of role: the server drains, the scheduler is asked, requests are read by the new role's rule."""

from __future__ import annotations

import asyncio

import pytest

from radixpd.config.settings import DisaggregationSettings
from radixpd.runtime.messages import Control, Generate

ROOM = {"bootstrap_host": "127.0.0.1", "bootstrap_room": 7}


async def half(make_api, mode: str):
    return await make_api(disaggregation=DisaggregationSettings(disaggregation_mode=mode))


async def mode_of(api) -> str:
    async with api.http.get("/server_info") as response:
        return (await response.json())["disaggregation_mode"]


async def test_rooms_are_read_by_the_new_roles_rule(make_api) -> None:
    api = await half(make_api, "prefill")
    assert await api.post("/pd_role_switch", {"role": "decode"}) == {"role": "decode", "before": "prefill"}
    assert [(order.action, order.args) for order in api.engine.of(Control)] == [("switch_role", {"role": "decode"})]
    await api.post("/generate", {"text": "abc", **ROOM})
    assert api.engine.of(Generate)[-1].room.peer == "127.0.0.1:8998"
    assert await mode_of(api) == "decode"


async def test_the_same_role_again_is_nothing_to_do(make_api) -> None:
    api = await half(make_api, "decode")
    assert await api.post("/pd_role_switch", {"role": "decode"}) == {"role": "decode", "before": "decode"}
    assert api.engine.of(Control) == []


async def test_a_server_for_whole_requests_has_no_other_role(api) -> None:
    error = (await api.post("/pd_role_switch", {"role": "decode"}, status=400))["error"]
    assert error["param"] == "role"
    assert "--disaggregation-mode" in error["message"]


async def test_it_waits_for_requests_and_takes_none_meanwhile(make_api) -> None:
    api = await half(make_api, "prefill")
    api.engine.hold()
    first = asyncio.create_task(api.generate("abc"))
    await api.engine.received(Generate)
    switch = asyncio.create_task(api.post("/pd_role_switch", {"role": "decode"}))
    while not api.service.manager.draining:
        await asyncio.sleep(0)
    assert "draining" in (await api.post("/generate", {"text": "abc"}, status=503))["error"]["message"]
    assert "draining" in (await api.post("/pd_role_switch", {"role": "decode"}, status=503))["error"]["message"]
    api.engine.release()
    assert (await first)["text"] == "abc"
    assert (await switch)["role"] == "decode"
    assert (await api.generate("abc"))["text"] == "abc"


async def test_when_it_cannot_drain_nothing_has_changed(make_api) -> None:
    api = await half(make_api, "prefill")
    api.engine.hold()
    first = asyncio.create_task(api.generate("abc"))
    await api.engine.received(Generate)
    assert "0.01 s" in (await api.post("/pd_role_switch", {"role": "decode", "timeout": 0.01}, status=503))["error"]["message"]
    assert api.engine.of(Control) == []
    api.engine.release()
    assert (await first)["text"] == "abc"
    assert await mode_of(api) == "prefill"


async def test_what_the_scheduler_refuses_is_told_and_changes_nothing(make_api) -> None:
    api = await half(make_api, "decode")
    api.engine.stuck = "a peer may still write into pages of this server"
    assert "may still write" in (await api.post("/pd_role_switch", {"role": "prefill"}, status=400))["error"]["message"]
    assert await mode_of(api) == "decode"


@pytest.mark.parametrize("body", [{}, {"role": "null"}, {"role": "prefill", "timeout": -1}, {"role": "prefill", "timeout": 1e9}])
async def test_the_body_is_checked(make_api, body) -> None:
    api = await half(make_api, "decode")
    assert (await api.post("/pd_role_switch", body, status=400))["error"]["param"] in ("role", "timeout")
