"""`/openapi.json`: the description of this server, put together from its routes, what they say of themselves, its guards and its limits.

Nothing is written twice: paths and methods are the router's, bodies the structs that handlers read, ranges admission's, answers the types
of `answers` and `state_answers`, keys and deadlines the guards'. `/docs` is the same as a plain list for people. Built once, when the
application is; a route without a `Doc` is a bug that keeps the server from starting. Called by `app`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from radixpd import __version__
from radixpd.runtime.admission import Limits
from radixpd.server.answers import ErrorAnswer
from radixpd.server.docs import JSON_TYPE, REFERENCE, Doc, Schema
from radixpd.server.guards import REQUEST_ID, REQUEST_ID_FORM, Gate, Keys
from radixpd.server.request_schemas import request_schemas

__all__ = ["DOCS", "DOCUMENT", "ROUTES", "document"]

DOCUMENT: web.AppKey[Schema] = web.AppKey("document", dict)
ABOUT = "Fields that no schema names are ignored, with one warning in the log. GET /docs lists the routes."
EVENT_STREAM = "text/event-stream"
BODY_ERRORS = (408, 413, 415)
REASONS = {
    400: "The request is wrong: `param` names the field.",
    401: "No key, or a wrong one.",
    403: "The key is not an admin key.",
    404: "There is no such thing.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    499: "Aborted through /abort_request.",
    500: "A process of the server has failed, or a bug.",
    502: "The other server of a prefill/decode pair has failed.",
    503: "Not now: starting, draining, or full. `Retry-After` says when to try again.",
    504: "Not finished within --request-timeout, or a peer was silent for too long.",
}
SCHEMES: dict[str, Schema] = {
    "key": {"type": "http", "scheme": "bearer", "description": "one of --api-key or --admin-api-key"},
    "admin": {"type": "http", "scheme": "bearer", "description": "one of --admin-api-key"},
    "password": {"type": "http", "scheme": "basic", "description": "for browsers: any name, the key as password"},
}
PARAMETERS: dict[str, Schema] = {
    "RequestId": {
        "name": REQUEST_ID,
        "in": "header",
        "description": "the request's name in answers and logs; empty is as good as none",
        "schema": {"type": "string", "pattern": f"^({REQUEST_ID_FORM.pattern})?$"},
    }
}
HEADERS: dict[str, Schema] = {
    "RequestId": {
        "description": "the name that the client gave, or one made up",
        "required": True,
        "schema": {"type": "string", "pattern": f"^{REQUEST_ID_FORM.pattern}$"},
    },
    "RetryAfter": {"description": "seconds", "required": True, "schema": {"type": "integer", "minimum": 0}},
}


def document(router: web.UrlDispatcher, docs: Mapping[Handler, Doc], limits: Limits, *, keys: Keys, gate: Gate) -> Schema:
    """The document of a server with these routes, limits and guards."""
    shown = list(_routes(router, docs))
    schemas, named = _schemas([docs[handler] for *_, handler in shown], limits)
    paths: Schema = {}
    used: set[str] = set()
    for method, path, handler in shown:
        schemes = keys.schemes(path, handler)
        used.update(schemes)
        paths.setdefault(path, {})[method] = _operation(method, path, docs[handler], named, schemes, gate.statuses(handler))
    components: Schema = {"schemas": schemas, "parameters": PARAMETERS, "headers": HEADERS}
    if used:
        components["securitySchemes"] = {name: SCHEMES[name] for name in sorted(used)}
    info = {"title": "radixpd", "version": __version__, "description": ABOUT}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _routes(router: web.UrlDispatcher, docs: Mapping[Handler, Doc]) -> Iterator[tuple[str, str, Handler]]:
    for route in router.routes():
        # HEAD comes with every GET.
        if route.method == "HEAD" or route.resource is None:
            continue
        path = route.resource.canonical
        if route.handler not in docs:
            raise LookupError(f"{route.method} {path}: give its handler a line in DOCS, beside ROUTES (see server/docs.py)")
        yield route.method.lower(), path, route.handler


def _schemas(docs: list[Doc], limits: Limits) -> tuple[dict[str, Schema], dict[Any, Schema]]:
    """All named schemas, and for each type of a `Doc` the schema to put where it is used."""
    schemas, named = request_schemas([doc.body for doc in docs if doc.body is not None], limits)
    answers: list[Any] = [
        ErrorAnswer,
        *{kind for doc in docs for kind in (doc.answer, doc.events, *doc.others.values()) if kind is not None},
    ]
    found, components = msgspec.json.schema_components(answers, ref_template=REFERENCE)
    assert not schemas.keys() & components.keys()  # a name would mean two things
    return {**schemas, **{name: _always(schema) for name, schema in components.items()}}, {**named, **dict(zip(answers, found))}


def _always(schema: Schema) -> Schema:
    """An answer's dataclass: defaults are for the code, in an answer every field is there."""
    required = [name for name, field in schema.get("properties", {}).items() if "default" in field]
    fields = {name: {key: item for key, item in field.items() if key != "default"} for name, field in schema.get("properties", {}).items()}
    return {**schema, "properties": fields, "required": sorted({*schema.get("required", ()), *required})}


def _operation(method: str, path: str, doc: Doc, named: Mapping[Any, Schema], schemes: tuple[str, ...], more: tuple[int, ...]) -> Schema:
    """One operation; `schemes`: the keys that it takes; `more`: statuses that a guard may answer."""
    responses: Schema = {"200": {"description": "The answer.", "headers": _headers(200), "content": _content(doc, named)}}
    keyed = ((401, 403) if "admin" in schemes else (401,)) if schemes else ()
    for status in sorted({400, *doc.errors, *more, *keyed, *(BODY_ERRORS if doc.body else ()), 500}):
        content = {JSON_TYPE: {"schema": named[ErrorAnswer]}}
        responses[str(status)] = {"description": REASONS[status], "headers": _headers(status), "content": content}
    for status, kind in doc.others.items():
        responses[str(status)] = {"description": "Not now.", "headers": _headers(200), "content": {JSON_TYPE: {"schema": named[kind]}}}
    operation: Schema = {
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_"),
        "summary": doc.summary,
        "parameters": _parameters(path, doc),
        "responses": responses,
    }
    if doc.body is not None:
        operation["requestBody"] = {"required": doc.body.required, "content": {JSON_TYPE: {"schema": named[doc.body.kind]}}}
    if schemes:
        operation["security"] = [{name: []} for name in schemes]
    return operation


def _headers(status: int) -> Schema:
    headers = {REQUEST_ID: {"$ref": "#/components/headers/RequestId"}}
    return headers | ({hdrs.RETRY_AFTER: {"$ref": "#/components/headers/RetryAfter"}} if status == 503 else {})


def _content(doc: Doc, named: Mapping[Any, Schema]) -> Schema:
    answer = {"type": "string"} if doc.answer is None else named[doc.answer]
    content: Schema = {media: {"schema": answer} for media in doc.media}
    if doc.events is not None:
        content[EVENT_STREAM] = {"schema": _event({"anyOf": [named[doc.events], named[ErrorAnswer]]})}
    return content


def _event(data: Schema) -> Schema:
    """The schema of a stream stands for each of its events: OpenAPI 3.1 has no other place for it."""
    inner: Schema = {"type": "string", "contentMediaType": JSON_TYPE, "contentSchema": data}
    return {
        "type": "object",
        "description": "Each event of the stream; the last one of a stream that went well is [DONE].",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, inner]}},
        "required": ["data"],
    }


def _parameters(path: str, doc: Doc) -> list[Schema]:
    inside = re.findall(r"{(\w+)}", path)
    text = {"type": "string", "minLength": 1}
    return [
        *({"name": name, "in": "path", "required": True, "schema": doc.parameters.get(name, text)} for name in inside),
        *({"name": name, "in": "query", "schema": schema} for name, schema in doc.parameters.items() if name not in inside),
        *({"name": name, "in": "header", "schema": schema} for name, schema in doc.headers.items()),
        {"$ref": "#/components/parameters/RequestId"},
    ]


async def openapi_json(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    return web.Response(body=msgspec.json.encode(request.app[DOCUMENT]), content_type=JSON_TYPE)


async def docs(request: web.Request) -> web.Response:
    """GET /docs: one line for each route."""
    paths = request.app[DOCUMENT]["paths"]
    lines = [f"{method.upper():6} {path:24} {doc['summary']}" for path, item in paths.items() for method, doc in item.items()]
    return web.Response(text="\n".join([*lines, "", "Everything about them is in /openapi.json.", ""]))


ROUTES = (web.get("/openapi.json", openapi_json), web.get("/docs", docs))
DOCS = {
    openapi_json: Doc("This server's description, OpenAPI 3.1", answer=dict[str, Any]),
    docs: Doc("The routes, one a line", media=("text/plain",)),
}
