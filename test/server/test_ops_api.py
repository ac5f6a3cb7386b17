"""Orders about the server's workings, and what every request leaves behind: counts by route, lines in the request log."""

from __future__ import annotations

import asyncio
import json
import logging
import re

import pytest

from radixpd.config.settings import ObserveSettings
from radixpd.runtime.messages import Control


def orders(api):
    return [(order.to, order.action, order.args) for order in api.engine.of(Control)]


@pytest.fixture(autouse=True)
def _same_log_level():
    root = logging.getLogger()
    before = root.level
    yield
    root.setLevel(before)


async def test_the_log_level_goes_to_every_process(api) -> None:
    answer = await api.post("/configure_logging", {"log_level": "error"})
    assert answer == {"log_level": "error", "log_requests": False, "log_requests_level": 1, "log_requests_format": "text"}
    assert logging.getLogger().level == logging.ERROR
    assert orders(api) == [(to, "configure_logging", {"log_level": "error"}) for to in ("scheduler", "runner")]


async def test_the_request_log_changes_while_requests_run(api, capfd) -> None:
    await api.generate("abc", rid="before")
    await api.post("/configure_logging", {"log_requests": True, "log_requests_format": "json", "log_requests_level": 2})
    await api.generate("abc", rid="during", cache_salt="SALT", extra_key="KEY")
    await api.post("/configure_logging", {"log_requests": False})
    await api.generate("abc", rid="after")
    text = capfd.readouterr().err
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [(line["message"], line["rid"]) for line in lines] == [("request.received", "during"), ("request.finished", "during")]
    assert (lines[0]["input"], lines[0]["salted"], lines[1]["output"]) == ("abc", True, "abc")
    assert "SALT" not in text
    assert "KEY" not in text


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"log_level": "loud"}, "log_level"),
        ({"log_requests_level": 4}, "log_requests_level must be between 0 and 3, got 4"),
        ({"log_requests_level": -1}, "log_requests_level"),
        ({"log_requests_level": True}, "log_requests_level"),
        ({"log_requests_format": "xml"}, "log_requests_format"),
        ({"log_requests": 1}, "log_requests"),
        ({"crash_dump_folder": "/tmp"}, "--crash-dump-folder"),
        ({"dump_requests_folder": "../x"}, "--crash-dump-folder"),
        ({"log_file": "x"}, "log_file"),
    ],
)
async def test_an_order_that_is_not_understood_changes_nothing(api, body, word) -> None:
    error = (await api.post("/configure_logging", {"log_level": "debug", "log_requests": True, **body}, status=400))["error"]
    assert word in error["message"]
    assert orders(api) == []
    assert not api.service.manager.request_log.enabled


@pytest.mark.parametrize("path", ["../../x", "/tmp/x", ".", "..%2f", "a"])
async def test_se_10_no_body_chooses_where_a_profile_goes(api, path) -> None:
    error = (await api.post("/start_profile", {"output_dir": path, "num_steps": 3}, status=400))["error"]
    assert (error["param"], "--profile-folder" in error["message"]) == ("output_dir", True)
    assert orders(api) == []


@pytest.mark.parametrize("steps", [0, -1, 1001, 2**70, 1.5, "3", True])
async def test_a_profile_is_bounded(api, steps) -> None:
    error = (await api.post("/start_profile", {"num_steps": steps}, status=400))["error"]
    assert error["param"] == "num_steps"
    assert orders(api) == []


async def test_a_profile_is_the_runners_work(api) -> None:
    assert await api.post("/start_profile", {"num_steps": 3, "with_stack": True, "activities": ["CPU"]}) == {"num_steps": 3}
    assert (await api.http.post("/start_profile")).status == 200  # no body: the defaults
    assert (await (await api.http.post("/stop_profile")).json()) == {"path": "/fake/trace.json"}
    assert orders(api) == [
        ("runner", "start_profile", {"steps": 3, "record_shapes": False, "with_stack": True}),
        ("runner", "start_profile", {"steps": 50, "record_shapes": False, "with_stack": False}),
        ("runner", "stop_profile", {}),
    ]
    assert "GPU" in (await api.post("/start_profile", {"activities": ["GPU"]}, status=400))["error"]["message"]


async def test_garbage_collectors_are_told(api) -> None:
    answer = await (await api.http.post("/freeze_gc")).json()
    assert answer["api"] > 1000
    assert (answer["scheduler"], answer["runner"]) == (1, 1)


@pytest.mark.parametrize("path", ["/configure_logging", "/start_profile", "/stop_profile", "/freeze_gc"])
async def test_orders_wait_until_the_server_is_open(make_api, path) -> None:
    api = await make_api(opened=False)
    response = await api.http.post(path, json={})
    assert response.status == 503
    assert "Retry-After" in response.headers


async def test_answers_are_counted_by_route_never_by_path(api) -> None:
    await api.generate("abc")
    await api.post("/generate", {}, status=400)
    for path in ("/v1/models/a", "/v1/models/b", "/nothing/a", "/nothing/b"):
        await api.http.get(path)
    await api.http.request("PROPFIND", "/generate")
    text = await (await api.http.get("/metrics")).text()
    counted = {
        (route, method, int(status)): float(value)
        for method, route, status, value in re.findall(
            r'radixpd:http_requests_total\{method="(.*?)",model_name=".*?",route="(.*?)",status="(.*?)"\} (.*)', text
        )
    }
    assert counted == {
        ("/generate", "POST", 200): 1,
        ("/generate", "POST", 400): 1,
        ("/v1/models/{id}", "GET", 404): 2,
        ("other", "GET", 404): 2,
        ("other", "other", 405): 1,
    }


async def test_a_client_that_hangs_up_is_counted_as_such(api) -> None:
    api.engine.hold()
    with pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(0.2):
            await api.http.post("/generate", json={"text": "abc"})
    async with asyncio.timeout(10):
        while 'route="/generate",status="499"' not in await (await api.http.get("/metrics")).text():
            pass


async def test_refusals_are_logged_with_code_and_status(make_api, capfd) -> None:
    api = await make_api(observe=ObserveSettings(log_requests=True, log_requests_level=0, log_requests_format="json"))
    await api.post("/generate", {"text": "SECRETTEXT", "sampling_params": {"temperature": -1}}, status=400)
    await api.post("/v1/completions", {"prompt": "abc", "suffix": "x"}, status=400)
    await api.http.get("/health")
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert [(line["message"], line["route"], line["status"], line.get("code"), line.get("param")) for line in lines] == [
        ("request.refused", "/generate", 400, 400, "temperature"),
        ("request.refused", "/v1/completions", 400, "unsupported_field", "suffix"),
    ]
    assert "SECRETTEXT" not in str(lines)
    response = await api.http.post("/generate", json={}, headers={"X-Request-Id": "from-the-client"})
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["request_id"] == response.headers["X-Request-Id"] == "from-the-client"


async def test_no_logs_means_no_line_and_no_metrics_means_no_latency(make_api, capfd) -> None:
    api = await make_api(observe=ObserveSettings(log_requests=True))
    await api.generate("abc", no_logs=True, log_metrics=False, rid="quiet")
    await api.generate("abc", rid="loud")
    text = capfd.readouterr().err
    assert "loud" in text
    assert "quiet" not in text
    assert 'time_to_first_token_seconds_count{model_name="org/fake"} 1.0' in await (await api.http.get("/metrics")).text()
