"""JSON Schema of request bodies: types from the structs that handlers read, ranges and caps from admission's own tables.

Invariant: a value that a schema allows is refused only for what no schema can say (whether a prompt fits, what two fields say together),
and a value that it forbids is a 400; tests draw both. Called by `openapi`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from radixpd.runtime.admission import (
    LATER,
    MAX_BIAS,
    MAX_HOST,
    MAX_LIST,
    MAX_NAME,
    MAX_PATTERN,
    MAX_PATTERNS,
    MAX_SAMPLES,
    MAX_SOURCE,
    MAX_STOP_LENGTH,
    NOTHING,
    RANGES,
    TOKENS,
    Limits,
    Options,
    Sampling,
)
from radixpd.server.docs import REFERENCE, Body, Schema, ref

__all__ = ["request_schemas"]

Ranges = Mapping[str, tuple[float, float]]

LENGTHS: Ranges = {
    "stop": (1, MAX_STOP_LENGTH),
    "stop_regex": (1, MAX_PATTERN),
    "json_schema": (1, MAX_SOURCE),
    "regex": (1, MAX_SOURCE),
    "ebnf": (1, MAX_SOURCE),
    "structural_tag": (1, MAX_SOURCE),
    "rid": (1, MAX_NAME),
    "extra_key": (0, MAX_NAME),
    "cache_salt": (0, MAX_NAME),
    "bootstrap_host": (1, MAX_HOST),
}  # of strings
COUNTS = {"stop": MAX_LIST, "stop_regex": MAX_PATTERNS, "stop_token_ids": MAX_LIST, "token_ids_logprob": MAX_LIST}  # of lists
IDS = ("stop_token_ids", "token_ids_logprob")
NOTES = {
    "max_new_tokens": "prompt and output together must fit this server; without it a default that is cut to what fits",
    "min_new_tokens": "until then no end of sequence and no stop token is sampled",
    "temperature": "below 1e-6: greedy",
    "top_k": "-1 and 0: all",
    "logit_bias": "token id -> what is added to its logit",
    "rid": "the request's name, for aborts; no two live requests share one",
    "priority": "higher goes first, with --schedule-policy priority",
    "extra_key": "requests share cached prefixes only where extra_key and cache_salt are equal",
    "cache_salt": "requests share cached prefixes only where extra_key and cache_salt are equal",
    "logprob_start_len": "first prompt position that is scored, at most the prompt's length; -1: none",
    "no_stop_trim": "what stopped the output stays in its text",
    "stop_regex": "Python's syntax, without look-around, back-references and $; ends the output where it first matches",
    "json_schema": "the output is a document of this JSON schema; docs/structured.md lists the keywords",
    "regex": "the output matches this pattern from end to end; Python's syntax, without look-around, back-references and flags",
    "ebnf": "the output is a text of this grammar, whose first rule is root",
    "structural_tag": "certain beginnings open a part of the output that follows a schema",
    "stream_interval": "least tokens of a streamed chunk; default: --stream-interval",
    "truncate_prompt_tokens": "keep the last so many tokens of the prompt; -1: as many as leave room for the output",
    "no_logs": "keep this request out of the request log",
    "log_metrics": "false: keep it out of the latencies of /metrics",
    "stream": "answer with server-sent events",
    "parallel_tool_calls": "false: one call at most",
    "separate_reasoning": "false: what the model thinks is content",
    "stream_reasoning": "false: a stream tells what the model thinks in one piece, at its end",
    "bootstrap_host": "the prefill server of this prompt; without any bootstrap_ field a prompt is served whole",
    "bootstrap_port": "of the prefill server; default: 8998",
    "bootstrap_room": "the number of the handoff, the same on both servers; one number for many prompts is counted up",
}
EXAMPLES: dict[str, list[Any]] = {
    "text": ["The capital of France is"],
    "prompt": ["The capital of France is"],
    "messages": [[{"role": "user", "content": "Say hi."}]],
    "tokens": [[1, 2]],
}
REPLACED: dict[str, Schema] = {
    "logit_bias": {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_BIAS,
    },
    "spaces_between_special_tokens": {"enum": [True, None]},
    "truncate_prompt_tokens": {"anyOf": [{"enum": [-1, None]}, {"type": "integer", "minimum": 1, "maximum": TOKENS}]},
}
NULLS: Schema = {"type": "object", "additionalProperties": {"type": "null"}}
NO_ROOM: Schema = {"description": "this server does not split prefill and decode"}
NO_ROOMS: dict[str, Schema] = {
    "bootstrap_host": {**NO_ROOM, "type": "null"},
    "bootstrap_port": {**NO_ROOM, "anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "null"}, "minItems": 1}]},
    "bootstrap_room": {**NO_ROOM, "type": "null"},
}
UNSERVED = "of a feature that is not served: must ask for nothing"


def request_schemas(bodies: Sequence[Body], limits: Limits) -> tuple[dict[str, Schema], dict[Any, Schema]]:
    """Named schemas, and for each body's struct a reference to its own."""
    kinds: list[Any] = [Sampling, Options, *{body.kind for body in bodies}]
    references, structs = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    named = dict(zip(kinds, references))
    ranges = _ranges(limits)
    wishes = {**_narrowed(structs["Sampling"], ranges), **_narrowed(structs.pop("Options"), ranges)}
    sampling = {**structs["Sampling"], "properties": _narrowed(structs["Sampling"], ranges), "allOf": [ref("Unserved")]}
    closed = {} if limits.rooms.read else NO_ROOMS
    finished = {
        body.kind.__name__: _body(replace(body, fields={**body.fields, **closed}), structs[body.kind.__name__], ranges, wishes)
        for body in bodies
    }
    return {**structs, **finished, "Sampling": sampling, **_fixed(limits)}, named


def _ranges(limits: Limits) -> Ranges:
    """Admission's ranges on this server."""
    most = TOKENS if limits.auto_truncate else limits.longest - 1
    samples = (1, min(MAX_SAMPLES, limits.max_running))
    return {**RANGES, "n": samples, "best_of": samples, "max_new_tokens": (0, most)}


def _fixed(limits: Limits) -> dict[str, Schema]:
    """Schemas that bodies refer to by name."""
    plain = [value for value in NOTHING if value != {}]
    return {
        "TokenId": {"type": "integer", "minimum": 0, "maximum": limits.vocab_size - 1, "description": "below the vocabulary's size"},
        "Nothing": {"anyOf": [{"enum": plain}, NULLS], "description": "a value that asks for nothing"},
        "Unserved": {
            "type": "object",
            "description": "Fields of features that are not served: refused by name unless they ask for nothing.",
            "properties": {name: _nothing(neutral) for name, neutral in LATER.items()},
        },
    }


def _body(body: Body, struct: Schema, ranges: Ranges, wishes: Mapping[str, Schema]) -> Schema:
    """A body, from its struct's own schema; `wishes` are the narrowed schemas of all native sampling and option names."""
    ranges = {**ranges, **body.ranges}
    properties = {name: body.fields.get(name) or _narrow(name, schema, ranges, body.lists) for name, schema in struct["properties"].items()}
    properties |= {given: wishes[ours] for given, ours in body.wishes.items() if given not in properties}
    properties |= {name: {"description": "accepted, no effect"} for name in sorted(body.harmless)}
    properties |= {name: {**properties[name], "examples": EXAMPLES[name]} for name in EXAMPLES.keys() & properties.keys()}
    schema = {**struct, "properties": properties}
    if body.refused:
        properties |= {name: _nothing(neutral) for name, neutral in body.refused.items() if name not in LATER}
        schema["allOf"] = [ref("Unserved")]
    return {**schema, **body.rule}


def _narrowed(struct: Schema, ranges: Ranges) -> dict[str, Schema]:
    """The properties of a struct's schema, with ranges, caps and notes."""
    return {name: _narrow(name, schema, ranges) for name, schema in struct["properties"].items()}


def _narrow(name: str, schema: Schema, ranges: Ranges, lists: tuple[int, int] | None = None) -> Schema:
    found = REPLACED.get(name) or _bound(schema, name, ranges, lists)
    found = {key: value for key, value in found.items() if not (key == "default" and value is None)}
    return {**found, "description": NOTES[name]} if name in NOTES else found


def _bound(schema: Schema, name: str, ranges: Ranges, lists: tuple[int, int] | None) -> Schema:
    """Closes every number, string and list of a schema."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [_bound(option, name, ranges, lists) for option in schema["anyOf"]]}
    match schema.get("type"):
        case "integer" | "number" if name in ranges:
            low, high = ranges[name]
            return {**schema, "minimum": low, "maximum": high}
        case "string" if name in LENGTHS:
            low, high = LENGTHS[name]
            return {**schema, "minLength": low, "maxLength": high}
        case "array":
            sizes = (0, COUNTS[name]) if name in COUNTS else lists
            cap = {} if sizes is None else {"minItems": sizes[0], "maxItems": sizes[1]}
            items = ref("TokenId") if name in IDS else _bound(schema.get("items", {}), name, ranges, None)
            return {**schema, "items": items, **cap}
    return schema


def _nothing(neutral: tuple[Any, ...]) -> Schema:
    """What a field of LATER may hold."""
    options = [ref("Nothing")]
    if plain := [value for value in neutral if not isinstance(value, dict)]:
        options.append({"enum": plain})
    for value in neutral:
        if isinstance(value, dict):
            fixed = {key: {"const": item} for key, item in value.items()}
            options.append({**NULLS, "properties": fixed, "required": list(fixed)})
    return {"anyOf": options} if len(options) > 1 else options[0]
