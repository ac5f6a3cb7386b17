"""The web page at `/`, its files, and the look at the cache that it draws.

The page is plain files beside this module. `/cache_tree` shows texts of everybody's prompts, so it is an order of the administrator, and
where several keys share a server without an administrator's the texts are left out. Invariant: however many look, the scheduler is asked
once at a time, and an answer serves everybody for `FRESH` seconds. Called by the application's router.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from functools import lru_cache

import msgspec
import numpy as np
from aiohttp import web

from radixpd.core.tree_view import OWNERS, CacheView, NodeView
from radixpd.server.docs import Doc
from radixpd.server.page_files import FOLDER, TYPES, PageFiles
from radixpd.server.replies import json_reply
from radixpd.server.service import Service
from radixpd.server.state_answers import CacheNode, CacheTree

__all__ = ["DOCS", "LOOKOUT", "PAGE_FILES", "ROUTES", "Lookout"]

PAGE_FILES = (
    "icon.svg", "page.css", "api.js", "cache.js", "chat.js", "elements.js", "layout.js", "page.js", "pool.js", "prompt.js", "tree.js",
)  # fmt: skip
FILES = PageFiles(FOLDER, names=PAGE_FILES)
FRESH = 0.25  # seconds for which a look at the cache is as good as a new one
ASK_SECONDS = 2.0
PREVIEW = 80  # characters of a node's text
SPELT = 4096  # heads whose text is remembered


class Lookout:
    """The latest look at the cache, renewed when somebody asks and it is older than `FRESH`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        server = service.resolved.settings.server
        self._texts = len(server.api_key) <= 1 or bool(server.admin_api_key)
        self._lock = asyncio.Lock()
        self._until = 0.0
        self._tree: CacheTree | None = None
        self._secret = secrets.token_bytes(16)  # names of namespaces must not be guessed from salts
        self._spell = lru_cache(SPELT)(self._text)

    async def look(self) -> CacheTree:
        """What there is to see."""
        async with self._lock:
            if self._tree is None or time.monotonic() >= self._until:
                if not self._service.client.ready.is_set():
                    self._service.manager.check_open()
                body = await self._service.client.control("cache_tree", seconds=ASK_SECONDS)
                self._tree = self._translate(msgspec.convert(body, CacheView, builtin_types=(bytes,)))
                self._until = time.monotonic() + FRESH
            return self._tree

    def _translate(self, view: CacheView) -> CacheTree:
        return {
            "page_size": view.page_size,
            "pages": {
                "total": view.pages,
                "free": view.free_pages,
                "tree": view.tree_pages,
                "locked": view.locked_pages,
                "request": view.request_pages,
                "quarantine": view.quarantine_pages,
            },
            "owners": list(OWNERS),
            "page_map": {"pages_per_cell": view.pages_per_cell, "runs": view.runs},
            "texts": self._texts,
            "nodes": [self._node(node, view.page_size) for node in view.nodes],
            "hidden_pages": view.hidden_pages,
        }

    def _node(self, node: NodeView, page_size: int) -> CacheNode:
        return {
            "id": node.id,
            "parent": node.parent,
            "namespace": hashlib.blake2b(node.space, key=self._secret, digest_size=4).hexdigest() if node.space else "",
            "tokens": node.pages * page_size,
            "pages": node.pages,
            "locks": node.locks,
            "hits": node.hits,
            "age": node.age,
            "children": node.children,
            "preview": self._spell(node.head) if self._texts else None,
            "head": np.frombuffer(node.head, dtype="<i4").tolist() if self._texts else None,
        }

    def _text(self, head: bytes) -> str:
        token_bytes = self._service.manager.tokenizer.token_bytes
        # Byte by byte: a node may begin and end inside a character, and the model may have ids that the tokenizer lacks.
        return b"".join(map(token_bytes, np.frombuffer(head, dtype="<i4").tolist())).decode("utf-8", "replace")[:PREVIEW]


LOOKOUT: web.AppKey[Lookout] = web.AppKey("lookout", Lookout)


async def index(request: web.Request) -> web.Response:
    """GET /: the page."""
    return FILES.index()


async def page_file(request: web.Request) -> web.Response:
    """GET /page/{name}: what the page is made of."""
    return FILES.file(request.match_info["name"])


async def cache_tree(request: web.Request) -> web.Response:
    """GET /cache_tree: page owners, and the most recently used nodes of the radix tree."""
    return json_reply(await request.app[LOOKOUT].look())


ROUTES = (web.get("/", index), web.get("/page/{name}", page_file), web.get("/cache_tree", cache_tree))
DOCS = {
    index: Doc("The web page", media=("text/html",)),
    page_file: Doc(
        "A file of the web page",
        media=(TYPES[".css"], TYPES[".js"], TYPES[".svg"]),
        parameters={"name": {"enum": list(PAGE_FILES)}},
        errors=(404,),
    ),
    cache_tree: Doc("Owners of the KV pages, and the latest nodes of the radix tree", answer=CacheTree, errors=(503,)),
}
