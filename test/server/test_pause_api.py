"""The routes of a pause: what the client says becomes one order to the scheduler."""

from __future__ import annotations

import asyncio

import pytest

from radixpd.runtime.messages import Control


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_a_pause_lasts_until_continue(api, mode) -> None:
    assert await api.post("/pause_generation", {"mode": mode}) == {"success": True}
    answer = asyncio.create_task(api.generate("abc"))
    await api.engine.received(Control)
    assert not answer.done()
    assert await api.post("/continue_generation", {}) == {"success": True}
    assert (await answer)["text"] == "abc"
    assert [order.action for order in api.engine.of(Control)] == [f"pause_{mode}", "continue"]


async def test_the_mode_is_abort_unless_the_client_says_otherwise_and_is_checked(api) -> None:
    await api.post("/pause_generation", {})
    assert api.engine.of(Control)[0].action == "pause_abort"
    error = (await api.post("/pause_generation", {"mode": "sleep"}, status=400))["error"]
    assert error["param"] == "mode"
    assert len(api.engine.of(Control)) == 1


async def test_a_scheduler_that_does_not_get_still_is_a_503(api, monkeypatch) -> None:
    monkeypatch.setattr("radixpd.server.admin_api.PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(api.engine, "_answer", lambda *_: None)
    assert "pause_retract" in (await api.post("/pause_generation", {"mode": "retract"}, status=503))["error"]["message"]
