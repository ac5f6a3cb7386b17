"""`/openapi.json`: the description of this server, put together from its routes, what they say of themselves, and its limits.

Nothing is written twice: paths and methods are the router's, bodies the structs that handlers read, ranges admission's, answers the types
of `answers`. `/docs` is the same as a plain list for people. Built once, when the application is; a route without a `Doc` is a bug that
keeps the server from starting. Called by `app`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from radixpd import __version__
from radixpd.runtime.admission import Limits, Options, Sampling
from radixpd.server.answers import ErrorAnswer
from radixpd.server.docs import JSON_TYPE, Doc, Schema
from radixpd.server.request_schemas import body_schema, fixed_schemas, narrowed, ranges_of, sampling_schema

__all__ = ["DOCS", "DOCUMENT", "ROUTES", "document"]

DOCUMENT: web.AppKey[Schema] = web.AppKey("document", dict)
REFERENCE = "#/components/schemas/{name}"
EVENT_STREAM = "text/event-stream"
BODY_ERRORS = (400, 413, 415)
REASONS = {
    400: "The request is wrong: `param` names the field.",
    401: "No API key, or a wrong one.",
    404: "There is no such thing.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    499: "Aborted through /abort_request.",
    500: "A process of the server has failed, or a bug.",
    503: "Not now: starting, draining, or full. `Retry-After` says when to try again.",
}


def document(
    router: web.UrlDispatcher, docs: Mapping[Handler, Doc], limits: Limits, *, closed: bool, open_paths: Collection[str]
) -> Schema:
    """The document. `closed`: keys are set, and every path but `open_paths` needs one."""
    shown = list(_routes(router, docs))
    schemas, named = _schemas([doc for *_, doc in shown], limits)
    paths: Schema = {}
    for method, path, doc in shown:
        keyed = closed and path not in open_paths
        paths.setdefault(path, {})[method] = _operation(method, path, doc, named, keyed=keyed)
    components: Schema = {"schemas": schemas}
    if closed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {
        "title": "radixpd",
        "version": __version__,
        "description": "Fields that no schema names are ignored. GET /docs lists the routes.",
    }
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _routes(router: web.UrlDispatcher, docs: Mapping[Handler, Doc]) -> Iterator[tuple[str, str, Doc]]:
    for route in router.routes():
        # HEAD comes with every GET.
        if route.method == "HEAD" or route.resource is None:
            continue
        path = route.resource.canonical
        if route.handler not in docs:
            raise LookupError(f"{route.method} {path}: give its handler a line in DOCS, beside ROUTES (see server/docs.py)")
        yield route.method.lower(), path, docs[route.handler]


def _schemas(docs: list[Doc], limits: Limits) -> tuple[dict[str, Schema], dict[Any, Schema]]:
    """All named schemas, and for each type of a `Doc` the schema to put where it is used."""
    bodies = {doc.body.kind: doc.body for doc in docs if doc.body is not None}
    answers = {kind for doc in docs for kind in (doc.answer, doc.events, *doc.others.values()) if kind is not None}
    types: list[Any] = [ErrorAnswer, Sampling, Options, *bodies, *answers]
    found, components = msgspec.json.schema_components(types, ref_template=REFERENCE)
    named = dict(zip(types, found))
    ranges = ranges_of(limits)
    requests = {_name(named[kind]) for kind in (Sampling, Options, *bodies)}
    structs = {name: components[name] for name in requests}
    schemas = {name: schema if name in requests else _always(schema) for name, schema in components.items()}
    wishes = {**narrowed(structs["Sampling"], ranges), **narrowed(structs["Options"], ranges)}
    for kind, body in bodies.items():
        name = _name(named[kind])
        schemas[name] = body_schema(body, structs[name], ranges, wishes)
    schemas["Sampling"] = sampling_schema(structs["Sampling"], ranges)
    del schemas["Options"]
    return {**schemas, **fixed_schemas(limits)}, named


def _name(reference: Schema) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def _always(schema: Schema) -> Schema:
    """An answer's dataclass: defaults are for the code, in an answer every field is there."""
    required = [name for name, field in schema.get("properties", {}).items() if "default" in field]
    fields = {name: {key: item for key, item in field.items() if key != "default"} for name, field in schema.get("properties", {}).items()}
    return {**schema, "properties": fields, "required": sorted({*schema.get("required", ()), *required})}


def _operation(method: str, path: str, doc: Doc, named: Mapping[Any, Schema], *, keyed: bool) -> Schema:
    responses: Schema = {"200": {"description": "The answer.", "content": _content(doc, named)}}
    statuses = {*doc.errors, *((401,) if keyed else ()), *(BODY_ERRORS if doc.body else ()), 500}
    for status in sorted(statuses):
        responses[str(status)] = {"description": REASONS[status], "content": {JSON_TYPE: {"schema": named[ErrorAnswer]}}}
        if status == 503:
            responses["503"]["headers"] = {"Retry-After": {"description": "seconds", "schema": {"type": "integer", "minimum": 0}}}
    for status, kind in doc.others.items():
        responses[str(status)] = {"description": "Not now.", "content": {JSON_TYPE: {"schema": named[kind]}}}
    operation: Schema = {
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_"),
        "summary": doc.summary,
        "responses": responses,
    }
    if parameters := _parameters(path, doc):
        operation["parameters"] = parameters
    if doc.body is not None:
        operation["requestBody"] = {"required": doc.body.required, "content": {JSON_TYPE: {"schema": named[doc.body.kind]}}}
    if keyed:
        operation["security"] = [{"key": []}]
    return operation


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
    parameters: list[Schema] = [{"name": name, "in": "path", "required": True, "schema": doc.parameters.get(name, text)} for name in inside]
    return parameters + [{"name": name, "in": "query", "schema": schema} for name, schema in doc.parameters.items() if name not in inside]


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
