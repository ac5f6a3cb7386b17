"""Files of a web page, sent as they are under a policy that allows scripts, styles and connections of this server alone.

Invariant: only names that the page lists are looked for, in the folders given, first come first served; nothing comes from other hosts.
Knows no service. Called by `page_api` and by the load balancer, whose page shares some files with the server's.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from aiohttp import web

from radixpd.server.wire import status_reply

__all__ = ["FOLDER", "TYPES", "PageFiles"]

FOLDER = Path(__file__).parent / "page"  # of the server's page
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class PageFiles:
    """One page: its `names`, each in the first of the folders that has it. The index is `index.html`."""

    def __init__(self, *folders: Path, names: Collection[str]) -> None:
        self._folders = folders
        self._names = frozenset(names)
        self._read: dict[str, bytes] = {}

    def index(self) -> web.Response:
        """The page itself."""
        return self._reply("index.html")

    def file(self, name: str) -> web.Response:
        """One of its files; 404 if it has none of this name."""
        if name not in self._names:
            return status_reply(404, f"the page has no file {name[:100]}")
        return self._reply(name)

    def _reply(self, name: str) -> web.Response:
        if name not in self._read:
            self._read[name] = next(folder / name for folder in self._folders if (folder / name).is_file()).read_bytes()
        return web.Response(body=self._read[name], content_type=TYPES[Path(name).suffix], charset="utf-8", headers=HEADERS)
