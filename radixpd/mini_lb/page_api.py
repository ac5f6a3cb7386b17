"""The status page at `/` and its files. What it shows comes from `/events` and `/explain`, with the key that it asks for.

The look, the requests and the drawing of elements are the server's page's own files. Called by the application's router.
"""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from radixpd.server.page_files import FOLDER, PageFiles

__all__ = ["PAGE_FILES", "ROUTES", "index", "page_file"]

PAGE_FILES = ("icon.svg", "page.css", "fleet.css", "api.js", "elements.js", "keys.js", "fleet.js", "why.js")
FILES = PageFiles(Path(__file__).parent / "page", FOLDER, names=PAGE_FILES)


async def index(request: web.Request) -> web.Response:
    """GET /: the page."""
    return FILES.index()


async def page_file(request: web.Request) -> web.Response:
    """GET /page/{name}: what the page is made of."""
    return FILES.file(request.match_info["name"])


ROUTES = (web.get("/", index), web.get("/page/{name}", page_file))
