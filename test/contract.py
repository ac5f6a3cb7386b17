"""`/openapi.json` as a contract: are this request and this answer what the document says?

Answers are held to it strictly: a field that the document does not name is a failure too. `EXCUSES` are the reasons for which the server
may refuse a body that its schema allows: what no schema can say. Used by unit tests, and by the fuzzer on a real server.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
from server.events import parse_events

__all__ = ["EXCUSES", "Contract", "candidates"]

HUGE, MANY = 10**40, 5000
OPEN = ("ServerInfo",)  # answers with fields besides the named ones
EXCUSES = re.compile(
    "|".join(
        [
            r"the request needs \d+", r"more than any \d+ tokens", r"is empty: it has no tokens",  # the prompt, known after tokenizing
            r"holds \d+ values for \d+ prompts", r"rid must be a list", r"rid names one prompt", r"in use by a live request",
            r"two outputs of this request",
            r"logprob_start_len must be between -1 and \d+, the prompt's length", r"may ask for at most \d+ outputs",
            r"min_\w+ must be at most max_", r"mean the same: give one of them", r"best_of must be between n", r"best_of above n cannot",
            r"top_logprobs needs logprobs", r"stream_options is allowed only", r"needs an assistant message at the end",
            r"exclude each other", r"does not show the last message's text", r"the chat template", r"chat_template_kwargs may not set",
            r"logit_bias: keys are token ids", r"this server writes no profiles", r"no profile was started",
            r"^this server does not split prefill and decode",  # a change of role; a room says which field it is
            r"stop_regex: ", r"(json_schema|regex|ebnf|structural_tag|response_format): ", r"an output follows one grammar",
            r"^the request's grammar is refused: ",  # known after compiling
            r"bootstrap_\w+ is missing: it goes with", r"is not a loopback address", r"is none of --disaggregation-peers",
            r"bootstrap_host must be a host name", r"two prompts of this request",
            r"^tools: ", r"^tools\[", r"^tool_choice required needs tools", r"^tool_choice names a function",
            r"prompts take the rooms from", r"values must be equal", r"bootstrap_room \d+ is in use",
        ]
    )
)  # fmt: skip
ZOO: tuple[Any, ...] = (None, True, False, 1, 0, 0.5, "x", "", [], ["x"], [1], [[1]], {}, {"x": 1})  # a value of every kind


class Contract:
    """One document."""

    def __init__(self, document: Any) -> None:
        self.document = document
        closed = copy.deepcopy(document["components"])
        for name, schema in closed["schemas"].items():
            if "properties" in schema and name not in OPEN:
                schema["additionalProperties"] = False
        self._open, self._closed = document["components"], closed
        self._validators: dict[tuple[int, bool], jsonschema_rs.Draft202012Validator] = {}  # by identity: the document does not change

    def operations(self) -> Iterator[tuple[str, str, Any]]:
        """Method, path template, operation."""
        for path, item in self.document["paths"].items():
            for method, operation in item.items():
                yield method, path, operation

    def body_schema(self, method: str, path: str) -> Any:
        """The schema of a request's body."""
        return self.resolve(self.document["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"])

    def resolve(self, schema: Any) -> Any:
        """What a reference means."""
        while "$ref" in schema:
            schema = self._open["schemas"][schema["$ref"].rpartition("/")[2]]
        return schema

    def allows(self, schema: Any, value: Any) -> bool:
        """Whether a request's value is valid."""
        return bool(self._validator(schema, strict=False).is_valid(value))

    def check(self, method: str, path: str, status: int, content_type: str, body: bytes) -> None:
        """Raise unless the document has this answer."""
        where = f"{method} {path} -> {status} {content_type}"
        responses = self.document["paths"][path][method]["responses"]
        assert str(status) in responses, f"{where}: the status is not in the document: {body[:300]!r}"
        content = responses[str(status)]["content"]
        assert content_type in content, f"{where}: the content type is not in the document"
        schema = content[content_type]["schema"]
        if content_type == "text/event-stream":
            data = schema["properties"]["data"]["anyOf"]
            assert data[0] == {"const": "[DONE]"}
            for event in parse_events(body.decode()):
                if event != "[DONE]":
                    self._hold(data[1]["contentSchema"], event, where)
        elif content_type == "application/json":
            self._hold(schema, json.loads(body), where)

    def _hold(self, schema: Any, value: Any, where: str) -> None:
        try:
            self._validator(schema, strict=True).validate(value)
        except jsonschema_rs.ValidationError as error:
            raise AssertionError(f"{where}: {error.message}\n{json.dumps(value)[:2000]}") from None

    def _validator(self, schema: Any, *, strict: bool) -> jsonschema_rs.Draft202012Validator:
        key = (id(schema), strict)
        if key not in self._validators:
            components = self._closed if strict else self._open
            self._validators[key] = jsonschema_rs.Draft202012Validator({**schema, "components": components})
        return self._validators[key]


def candidates(contract: Contract, schema: Any, depth: int = 0) -> list[Any]:
    """Values in and around a schema: both sides of every bound, and one of every kind."""
    found: list[Any] = [] if depth else list(ZOO)
    schema = contract.resolve(schema)
    for option in schema.get("anyOf", []):
        found += candidates(contract, option, depth + 1)
    found += schema.get("enum", [])
    types = schema.get("type", [])
    for kind in [types] if isinstance(types, str) else types:
        found += _around(contract, kind, schema, depth)
    unique = {json.dumps(value): value for value in found}
    return list(unique.values())


def _around(contract: Contract, kind: str, schema: Any, depth: int) -> list[Any]:
    """Both sides of every bound; where there is none, a value that any bound would forbid."""
    if kind in ("integer", "number"):
        step = 1 if kind == "integer" else 1e-7
        low, high = schema.get("minimum"), schema.get("maximum")
        return [*([-HUGE] if low is None else [low, low - step]), *([HUGE] if high is None else [high, high + step])]
    if kind == "string":
        return ["a" * size for size in _sizes(schema.get("minLength"), schema.get("maxLength"))]
    if kind == "array" and depth < 3:
        items = candidates(contract, schema["items"], depth + 1) if "items" in schema else []
        good = next((item for item in items if contract.allows(schema["items"], item)), None)
        return [[item] for item in items] + [[good] * size for size in _sizes(schema.get("minItems"), schema.get("maxItems"))]
    if kind == "object" and "maxProperties" in schema:
        most = schema["maxProperties"]
        values = candidates(contract, schema["additionalProperties"], depth + 1)
        return [{"0": value} for value in values] + [{"-1": 1}, {str(i): 0 for i in range(most + 1)}]
    return []


def _sizes(least: int | None, most: int | None) -> list[int]:
    least = least or 0
    return [*([] if least == 0 else [least - 1]), least, *([MANY] if most is None else [most, most + 1])]
