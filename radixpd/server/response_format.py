"""OpenAI's `response_format` as one of our own fields: a schema, any JSON object, or structural tags.

A schema is always kept to, also without `strict`. Called by `openai_types`.
"""

from __future__ import annotations

from typing import Any

from radixpd.errors import BadRequest
from radixpd.server.docs import Schema, or_null

__all__ = ["RESPONSE_FORMAT", "constraint"]

NAME = "response_format"
ANY_OBJECT: dict[str, Any] = {"type": "object"}
RESPONSE_FORMAT: Schema = or_null(
    {
        "anyOf": [
            {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
            {
                "type": "object",
                "properties": {
                    "type": {"const": "json_schema"},
                    "json_schema": {
                        "type": "object",
                        "properties": {"name": {"type": "string"}, "schema": {"type": "object", "description": "a JSON schema"}},
                        "required": ["schema"],
                    },
                },
                "required": ["type", "json_schema"],
            },
            {
                "type": "object",
                "description": "structures and triggers, or a format of type triggered_tags",
                "properties": {"type": {"const": "structural_tag"}},
                "required": ["type"],
            },
        ],
        "description": "what the answer must be",
    }
)


def constraint(value: dict[str, Any] | None) -> dict[str, Any]:
    """The native field that a `response_format` stands for, with its value; empty for free text."""
    if value is None:
        return {}
    match value.get("type"):
        case "text":
            return {}
        case "json_object":
            return {"json_schema": ANY_OBJECT}
        case "json_schema":
            inner = value.get("json_schema")
            if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
                raise BadRequest(f"{NAME}.json_schema.schema must be an object: a JSON schema", param=NAME)
            return {"json_schema": inner["schema"]}
        case "structural_tag":
            return {"structural_tag": {key: part for key, part in value.items() if key != "type"}}
    kinds = "text, json_object, json_schema, structural_tag"
    raise BadRequest(f"{NAME}.type must be one of {kinds}, got {str(value.get('type'))[:40]!r}", param=NAME)
