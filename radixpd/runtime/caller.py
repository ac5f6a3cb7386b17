"""Who a request comes from, as far as names and caches must know it.

The HTTP guards set it once for each request; the tokenizer manager reads it where requests are named, salted and aborted. A context
variable and no argument, so that it holds for every route, also for one that knows nothing of tenants. Without one (warm-up, offline) the
caller is the server itself. Invariant: two tenants share neither a namespace nor a rid.
"""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar
from dataclasses import dataclass

from radixpd.core.page_hash import namespace

__all__ = ["REQUEST_ID_FORM", "Caller", "caller", "set_caller"]

SCOPE_DIGITS = 16
REQUEST_ID_FORM = re.compile(r"[\x21-\x7e]{1,128}")  # what can be a header's value


@dataclass(slots=True, eq=False)
class Caller:
    """`tenant`: hex digest of the key, empty where tenants are not kept apart. `operator`: sees and ends the requests of all tenants.
    `request_id`: what the client named this HTTP request, if anything."""

    tenant: str = ""
    operator: bool = True
    request_id: str = ""
    rid: str = ""  # of the first prompt, once there is one

    @property
    def scope(self) -> str:
        """What the tenant's rids start with inside the server."""
        return f"{self.tenant[:SCOPE_DIGITS]}/" if self.tenant else ""

    @property
    def id(self) -> str:
        """What answers and logs call this HTTP request: the client's name for it, or the rid if a header can hold it, or one drawn now."""
        if not self.request_id:
            self.request_id = self.rid if REQUEST_ID_FORM.fullmatch(self.rid) else uuid.uuid4().hex
        return self.request_id

    def salted(self, space: bytes) -> bytes:
        """A namespace that only this tenant reaches, from the one that the request asks for."""
        return namespace({"tenant": self.tenant, "space": space.hex()}) if self.tenant else space

    def names(self, rid: str) -> tuple[str, ...]:
        """What requests that this caller means by `rid` are called inside the server. An operator may also use the name in the logs."""
        own = self.scope + rid
        return (own, rid) if self.operator and self.scope else (own,)

    def shown(self, rid: str) -> str:
        """What the caller calls a request of its own."""
        return rid.removeprefix(self.scope)

    def may_see(self, rid: str | None) -> bool:
        """Whether the request called `rid` inside the server is this caller's business; what is no request's is an operator's."""
        return self.operator or (rid is not None and rid.startswith(self.scope))


_CALLER: ContextVar[Caller] = ContextVar("caller")


def caller() -> Caller:
    """Who the running request comes from."""
    return _CALLER.get(None) or Caller()


def set_caller(who: Caller) -> None:
    """For the rest of this task, and of those that it starts."""
    _CALLER.set(who)
