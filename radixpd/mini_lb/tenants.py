"""Who a request counts as in the waiting line (`--fair-by`).

Invariant: what is kept is a digest, never a key or a header of any length. Whoever can choose the name can have as many lines as he likes:
a header must come from something trusted in front. Pure; called by the proxy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from aiohttp import hdrs

from radixpd.mini_lb.ask import Ask

__all__ = ["BY_USER", "tenant"]

BY_USER = "user"  # the body says who
BY_KEY = "api_key"


def tenant(fair_by: str, headers: Mapping[str, str], ask: Ask | None) -> str:
    """The request's tenant; those that do not say are one. `ask`: the body, where that is what tells."""
    if fair_by == BY_USER:
        name = ask.route.user if ask is not None else ""
    elif fair_by == BY_KEY:
        name = headers.get(hdrs.AUTHORIZATION, "").partition(" ")[2]
    else:
        name = headers.get(fair_by, "")
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()
