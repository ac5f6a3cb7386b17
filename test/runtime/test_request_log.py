"""The request log: what each level shows, what is never shown, and changes while it runs."""

from __future__ import annotations

import json
import types
from typing import Any

import numpy as np
import pytest

from radixpd.config.settings import ObserveSettings
from radixpd.core.request import Finish, SamplingParams
from radixpd.runtime.request_log import SHOWN_CHARACTERS, SHOWN_IDS, RequestLog

LONG = "x" * (SHOWN_CHARACTERS + 1)


def output(**changes: Any) -> Any:
    usual = {
        "rid": "job-1", "group": "job", "prompt": np.arange(7), "params": SamplingParams(temperature=0.0, seed=5), "priority": 0,
        "salted": True, "ids": [1, 2], "cached": 3, "finish": Finish("length"), "text": LONG, "arrived": 10.0,
        "queued": 0.25, "first": 11.0, "ended": 12.5,
    }  # fmt: skip
    return types.SimpleNamespace(**{**usual, **changes})


def logged(capsys: pytest.CaptureFixture[str], level: int, *, prompt: Any = LONG, **changes: Any) -> list[dict[str, Any]]:
    """The lines of one request's life."""
    log = RequestLog(ObserveSettings(log_requests=True, log_requests_level=level, log_requests_format="json", log_level="error"))
    one = output(**changes)
    log.received((one, one), prompt)
    log.ended(one)
    log.refused(
        route="/generate",
        method="POST",
        client="127.0.0.1",
        request_id="r-1",
        status=400,
        error={"message": "why", "code": "bad", "param": "n", "type": "t"},
    )
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_level_0_has_numbers_and_names_only(capsys) -> None:
    received, finished, refused = logged(capsys, 0)
    common = ("time", "level", "process")
    assert {name: value for name, value in received.items() if name not in common} == {
        "message": "request.received", "rid": "job", "prompt_tokens": 7, "samples": 2, "salted": True
    }  # fmt: skip
    assert {name: value for name, value in finished.items() if name not in common} == {
        "message": "request.finished", "rid": "job-1", "prompt_tokens": 7, "cached_tokens": 3, "completion_tokens": 2, "finish": "length",
        "e2e_seconds": 2.5, "queue_seconds": 0.25, "ttft_seconds": 1.0,
    }  # fmt: skip
    assert {name: value for name, value in refused.items() if name not in common} == {
        "message": "request.refused", "route": "/generate", "method": "POST", "client": "127.0.0.1", "request_id": "r-1", "status": 400,
        "code": "bad", "param": "n",
    }  # fmt: skip


def test_higher_levels_add_parameters_then_the_beginning_then_everything(capsys) -> None:
    for level in (1, 2, 3):
        received, finished, refused = logged(capsys, level)
        assert received["sampling_params"] == {"temperature": 0.0, "seed": 5}  # what differs from the defaults
        assert refused["reason"] == "why"
        shown = {1: None, 2: LONG[:-1], 3: LONG}[level]
        assert received.get("input") == shown
        assert finished.get("output") == shown


@pytest.mark.parametrize(("level", "count"), [(2, SHOWN_IDS), (3, SHOWN_IDS + 1)])
def test_ids_are_shown_as_the_client_gave_them(capsys, level, count) -> None:
    received, *_ = logged(capsys, level, prompt=np.arange(SHOWN_IDS + 1, dtype=np.int32))
    assert received["input"] == list(range(count))


def test_an_abort_says_why_and_one_that_never_ran_has_no_times(capsys) -> None:
    _, finished, _ = logged(capsys, 0, finish=Finish("abort", message="gone", status=499), queued=None, first=0.0)
    assert (finished["finish"], finished["status"], finished["reason"]) == ("abort", 499, "gone")
    assert not {"queue_seconds", "ttft_seconds"} & finished.keys()


def test_it_is_silent_unless_asked_and_can_be_changed_while_it_runs(capsys) -> None:
    log = RequestLog()
    log.received((output(),), "p")
    log.ended(output())
    log.refused(route="/", method="GET", client="", request_id="", status=404, error={})
    assert capsys.readouterr().err == ""
    log.configure(enabled=True, level=0)
    log.ended(output())
    assert "api] INFO request.finished rid=job-1 prompt_tokens=7" in capsys.readouterr().err
    log.configure(format="json")
    log.ended(output())
    assert json.loads(capsys.readouterr().err)["rid"] == "job-1"
    log.configure(enabled=False)
    log.ended(output())
    assert capsys.readouterr().err == ""


def test_all_logs_as_json_means_these_too(capsys) -> None:
    RequestLog(ObserveSettings(log_requests=True, log_format="json")).ended(output())
    assert json.loads(capsys.readouterr().err)["message"] == "request.finished"
