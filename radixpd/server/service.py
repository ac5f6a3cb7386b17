"""What every route handler needs, in one object that the aiohttp application carries.

Built once by the API process's main (or by a test); handlers get it with `service_of`. It holds no state of its own: `resolved` changes
when the server changes its role, and at no other time.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from aiohttp import web

from radixpd.config.resolve import Resolved
from radixpd.runtime.client import Client
from radixpd.runtime.metrics import Metrics
from radixpd.runtime.tokenizer_manager import TokenizerManager

__all__ = ["SERVICE", "Service", "service_of"]


@dataclass(slots=True)
class Service:
    """The parts of one API process. `incarnation`: its name; a restarted server has another one. `text_identity`: of tokenizer and chat
    template."""

    resolved: Resolved
    client: Client
    manager: TokenizerManager
    metrics: Metrics
    text_identity: str = ""
    incarnation: str = field(default_factory=lambda: secrets.token_hex(8))


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


def service_of(request: web.Request) -> Service:
    """The service that this request came to."""
    return request.app[SERVICE]
