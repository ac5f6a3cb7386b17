"""schemathesis against a running server, with the server's own `/openapi.json`.

`fuzz` sends what the document allows and what it forbids, and judges every answer twice: by schemathesis's checks, and by `Contract`
(every field of an answer is in the document; what the schema allows is refused only for what no schema can say). An order that stops
others (a pause) is taken back at once, so that the run goes on. The same seed gives the same requests.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import schemathesis
from contract import EXCUSES, Contract
from e2e.servers import Server
from schemathesis.config import SchemathesisConfig
from schemathesis.core import NotSet
from schemathesis.engine import Status, events, from_schema

__all__ = ["Tally", "fuzz"]

# Orders that would change what comes after them, and what takes them back.
UNDONE_BY: dict[str, tuple[str, Any]] = {
    "/pause_generation": ("/continue_generation", None),
    "/configure_logging": ("/configure_logging", {"log_level": "info", "log_requests": False}),
}
ANY_4XX = ["400", "401", "403", "404", "405", "413", "415"]
SECONDS = 120  # for one answer


@dataclass
class Tally:
    """What a run saw. `good`, `bad`: requests that the document allows and forbids, by operation and status."""

    seed: int
    requests: int = 0
    strays: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    good: dict[str, Counter[int]] = field(default_factory=dict)
    bad: dict[str, Counter[int]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # what went wrong -> an example

    def fail(self, what: str, example: str) -> None:
        """Keep the first example of each failure."""
        self.failures.setdefault(what, example)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.requests} requests, statuses {dict(sorted(self.statuses.items()))}"]
        lines.append(f"  {self.strays} of them with a method that the document lacks: 405")
        for name in sorted({*self.good, *self.bad}):
            good, bad = (dict(sorted(table.get(name, Counter()).items())) for table in (self.good, self.bad))
            lines.append(f"  {name:32} allowed {good}, forbidden {bad}")
        return "\n".join([*lines, *(f"FAILED {what}\n    {example}" for what, example in self.failures.items())])


def fuzz(server: Server, *, seed: int, examples: int, coverage: bool, key: str = "") -> Tally:
    """Up to `examples` random requests for each operation; `coverage`: and every bound of every field. `key`: one that opens all routes."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    document = server.get("/openapi.json", headers=headers).json
    contract, tally = Contract(document), Tally(seed)
    schema = schemathesis.openapi.from_dict(document, config=_config(server.url, seed, examples, key, coverage=coverage))

    @schema.hook("after_call")  # type: ignore[untyped-decorator]
    def undo(context: Any, case: Any, response: Any) -> None:
        if (order := UNDONE_BY.get(case.operation.path)) is not None:
            assert server.post(*order, headers=headers).status == 200

    for event in from_schema(schema).execute():
        if isinstance(event, events.ScenarioFinished):
            _judge(event.recorder, contract, tally)
        elif isinstance(event, events.NonFatalError):
            tally.fail(f"{event.label}: {event.info.title}", event.info.message)
        elif isinstance(event, events.FatalError):
            raise event.exception
    return tally


def _config(url: str, seed: int, examples: int, key: str, *, coverage: bool) -> SchemathesisConfig:
    off = {"enabled": False}
    return SchemathesisConfig.from_dict(
        {
            "seed": seed,
            "base-url": url,
            **({"auth": {"openapi": {name: {"bearer": key} for name in ("key", "admin")}}} if key else {}),
            "continue-on-failure": True,
            "request-timeout": SECONDS,
            "max-stream-events": 100_000,
            "suppress-health-check": ["all"],
            "output": {"sanitization": off, "truncation": {"max-recorded-payload-size": 0}},
            "analysis": {"constants": {"enabled": False}},  # words out of this very source
            "generation": {"max-examples": examples, "database": "none", "no-shrink": True},
            "phases": {"examples": off, "stateful": off, "coverage": {"enabled": coverage}},
            "checks": {
                "not_a_server_error": {"expected-statuses": ["2xx", "4xx"]},
                "negative_data_rejection": {"expected-statuses": ANY_4XX},
                "positive_data_acceptance": off,  # too simple: EXCUSES
            },
        }
    )


def _judge(recorder: Any, contract: Contract, tally: Tally) -> None:
    for id, interaction in recorder.interactions.items():
        case, response = recorder.cases[id].value, interaction.response
        name = f"{case.method} {case.operation.path}"
        example = f"{case.method} {interaction.request.uri} {dict(case.headers or {})} {_shown(case.body)}"
        tally.requests += 1
        if response is None:
            tally.fail(f"{name}: no answer", example)
            continue
        allowed = case.meta is None or case.meta.generation.mode.is_positive
        tally.statuses[response.status_code] += 1
        if case.method.lower() in contract.document["paths"][case.operation.path]:
            (tally.good if allowed else tally.bad).setdefault(name, Counter())[response.status_code] += 1
        else:
            tally.strays += 1
        example += f" -> {response.status_code} {response.content[:500]!r}"
        for check in recorder.checks.get(id, ()):
            if check.status is Status.FAILURE:
                failure = check.failure_info.failure
                tally.fail(f"{name}: {check.name}: {failure.title}: {failure.message[:300]}", example)
        try:
            _hold(case, response, contract, allowed=allowed)
        except AssertionError as error:
            tally.fail(f"{name}: {str(error)[:300]}", example)


def _hold(case: Any, response: Any, contract: Contract, *, allowed: bool) -> None:
    path, method = case.operation.path, case.method.lower()
    kind = response.headers["content-type"][0].partition(";")[0]
    if method not in contract.document["paths"][path]:
        assert response.status_code == 405, f"a method that the document lacks got {response.status_code}"
    elif response.status_code not in (404, 405) or "404" in contract.document["paths"][path][method]["responses"]:
        contract.check(method, path, response.status_code, kind, response.content)
    if allowed and response.status_code == 400:
        message = json.loads(response.content)["error"]["message"]
        assert EXCUSES.search(message), f"the document allows what the server refuses: {message}"


def _shown(body: Any) -> str:
    if isinstance(body, NotSet):
        return ""
    try:
        return json.dumps(body)[:2000]
    except TypeError:
        return repr(body)[:2000]
