"""What stands before every handler: who may call what, how many at once, for how long, and from which web page.

Invariants: with keys set, every path but `/health` needs one, unknown paths too; a preflight is answered before it, as browsers send none.
A handler that generates is counted and timed. The caller (`runtime.caller`) is set here and nowhere else. Called by the application, which
also says which handlers are an administrator's and which generate.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Collection

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from radixpd.config.settings import ServerSettings
from radixpd.errors import BadRequest, DeadlineExceeded, Overloaded
from radixpd.runtime.caller import REQUEST_ID_FORM, Caller, caller, set_caller
from radixpd.server.wire import SERVER, status_reply

__all__ = ["REQUEST_ID", "REQUEST_ID_FORM", "Cors", "Gate", "Keys", "stamp"]

OPEN_PATHS = frozenset(("/health",))
REQUEST_ID = "X-Request-Id"
TENANT = "radixpd tenant"  # what a key's digest is for; a change empties every tenant's cache
BROWSER_CHALLENGE = 'Basic realm="radixpd: any name, an API key as password", charset="UTF-8"'
METHODS = "GET, HEAD, POST, PUT, OPTIONS"
HEADERS = "Authorization, Content-Type, X-Request-Id"
HEADER_NAMES = re.compile(r"[\w!#$%&'*+.^`|~, -]+", re.ASCII)
PREFLIGHT_SECONDS = 600


async def stamp(request: web.Request, response: web.StreamResponse) -> None:
    """Headers that every answer has, plain or streamed."""
    response.headers[hdrs.SERVER] = SERVER
    response.headers[REQUEST_ID] = caller().id
    if request.content.exception() is not None:  # what follows a damaged body cannot be told from it: the connection ends, and says so
        response.force_close()
        response.headers[hdrs.CONNECTION] = "close"


class Keys:
    """API keys, admin keys, tenants. `admin`: handlers that need an admin key where one is set; `shared`: handlers that show the whole
    server, which do so where tenants are kept apart; `page`: handlers of the web page's files, where a browser may send the key as a
    password."""

    def __init__(
        self, settings: ServerSettings, *, admin: Collection[Handler], shared: Collection[Handler], page: Collection[Handler]
    ) -> None:
        self._keys = settings.api_key
        self._admin_keys = settings.admin_api_key
        self._admin = {*admin, *shared} if settings.salt_from_key else {*admin}
        self._page = frozenset(page)
        self._apart = settings.salt_from_key

    def schemes(self, path: str, handler: Handler) -> tuple[str, ...]:
        """What `/openapi.json` says of a route: which of key, admin, password it takes; none if it needs nothing."""
        if path in OPEN_PATHS:
            return ()
        if self._admin_keys and handler in self._admin:
            return ("admin",)
        return () if not self._keys else ("key", "password") if handler in self._page else ("key",)

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let pass who may; the caller is known from here on."""
        given = request.headers.get(REQUEST_ID, "")
        named = REQUEST_ID_FORM.fullmatch(given) is not None
        who = Caller(request_id=given if named else "", operator=not self._apart)
        set_caller(who)
        if request.path not in OPEN_PATHS and (refusal := self._refusal(request, who)) is not None:
            return refusal
        if given and not named:
            raise BadRequest(f"{REQUEST_ID} must have between 1 and 128 visible ASCII characters", param=REQUEST_ID)
        return await handler(request)

    def _refusal(self, request: web.Request, who: Caller) -> web.Response | None:
        for_admin = bool(self._admin_keys) and request.match_info.handler in self._admin
        if not self._keys and not for_admin:
            return None
        given = self._given(request)
        # Every key is compared, so that time tells nothing.
        admins = [key for key in self._admin_keys if key.matches(given)]
        matches = admins + [key for key in self._keys if key.matches(given)]
        if not given or not matches:
            challenge = BROWSER_CHALLENGE if request.match_info.handler in self._page else "Bearer"
            return _unauthorized("an admin key" if for_admin else "an API key", challenge)
        if for_admin and not admins:
            return status_reply(403, "this route needs an admin key (--admin-api-key)", code="admin_key_required")
        who.operator = who.operator or bool(admins)
        who.tenant = matches[0].digest(TENANT) if self._apart else ""
        return None

    def _given(self, request: web.Request) -> str:
        """The key that came with a request. A browser that opens a page can only send it as a password; it then sends that with requests
        that other sites make it send, too, so nothing but the page's files takes one."""
        scheme, _, given = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        if scheme.lower() == "basic" and request.match_info.handler in self._page:
            return _password(given)
        return given if scheme.lower() == "bearer" else ""


class Gate:
    """How many generation requests are open at once, and how long one may take."""

    def __init__(self, settings: ServerSettings, *, generating: Collection[Handler]) -> None:
        self._generating = frozenset(generating)
        self._most = settings.max_concurrent_requests
        self._seconds = settings.request_timeout
        self._open = 0

    def statuses(self, handler: Handler) -> tuple[int, ...]:
        """What `/openapi.json` says of a route: the errors that it may have from here."""
        if handler not in self._generating:
            return ()
        return (503,) if self._seconds is None else (503, 504)

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count and time a generation request; before its body is read."""
        if request.match_info.handler not in self._generating:
            return await handler(request)
        if self._open >= self._most:
            raise Overloaded(f"{self._most} requests are open, as many as --max-concurrent-requests allows")
        self._open += 1
        try:
            # Leaving by the deadline cancels the handler, which aborts what it has started.
            async with asyncio.timeout(self._seconds) as deadline:
                return await handler(request)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(f"the request was not finished within {self._seconds:g} s (--request-timeout)") from None
        finally:
            self._open -= 1


class Cors:
    """What web pages of other origins may do: nothing, unless their origin is allowed. `exposed`: further headers that they may read."""

    def __init__(self, settings: ServerSettings, *, exposed: Collection[str] = ()) -> None:
        self._exposed = ", ".join((REQUEST_ID, hdrs.RETRY_AFTER, *exposed))
        self._any = "*" in settings.allowed_origins
        self._origins = frozenset(settings.allowed_origins)

    @web.middleware
    async def preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a browser that asks whether it may send the real request."""
        asked = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if not (asked and self._allows(request)):
            return await handler(request)
        names = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: METHODS,
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: names if HEADER_NAMES.fullmatch(names) else HEADERS,
            hdrs.ACCESS_CONTROL_MAX_AGE: str(PREFLIGHT_SECONDS),
        }
        return web.Response(status=204, headers=headers)

    async def stamp(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let the page read the answer, also an error."""
        if self._origins and not self._any:
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if self._allows(request):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = "*" if self._any else request.headers[hdrs.ORIGIN]
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = self._exposed

    def _allows(self, request: web.Request) -> bool:
        origin = request.headers.get(hdrs.ORIGIN)
        return origin is not None and (self._any or origin in self._origins)


def _password(given: str) -> str:
    """The password of basic credentials; empty if they are none."""
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def _unauthorized(what: str, challenge: str) -> web.Response:
    return status_reply(
        401,
        f"this server needs {what}: Authorization: Bearer KEY",
        headers={hdrs.WWW_AUTHENTICATE: challenge},
        code="invalid_api_key",
    )
