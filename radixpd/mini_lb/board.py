"""What the status page shows: the fleet, the waiting line, hit rates, the last decisions, as one event that is made anew each second.

Invariant: however many look, one event is made for all of them, and only while somebody looks; who looks holds no place that a request
wants, and is cut off when he does not read. Called by the application's router.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from aiohttp import web

from radixpd.errors import Overloaded
from radixpd.mini_lb.control_api import shown
from radixpd.mini_lb.decisions import Decision
from radixpd.mini_lb.parts import Parts
from radixpd.server.faults import event, send

__all__ = ["BOARD", "ROUTES", "Board", "end_views", "events"]

EVERY = 1.0  # seconds between two events
MOST_VIEWERS = 64
SHOWN = 30  # decisions
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Board:
    """The newest event, and who looks."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._event = b""
        self._until = 0.0
        self.viewers = 0
        self.over = asyncio.Event()  # the balancer ends: nobody need look any longer

    def event(self) -> bytes:
        """What is true now, or was a moment ago."""
        now = time.monotonic()
        if now >= self._until:
            self._event = event(state(self._parts, now))
            self._until = now + EVERY / 2
        return self._event


BOARD: web.AppKey[Board] = web.AppKey("board", Board)


async def events(request: web.Request) -> web.StreamResponse:
    """GET /events: the state of the balancer, each second."""
    board = request.app[BOARD]
    if board.viewers >= MOST_VIEWERS:
        raise Overloaded(f"{MOST_VIEWERS} others look at the events")
    board.viewers += 1
    try:
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        while not board.over.is_set():
            await send(request, response, board.event())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY):
                    await board.over.wait()
        await response.write_eof()
        return response
    finally:
        board.viewers -= 1


async def end_views(app: web.Application) -> None:
    """At the shutdown, which else would wait for whoever looks."""
    app[BOARD].over.set()


def state(parts: Parts, now: float) -> dict[str, Any]:
    """The event's data."""
    gate, decisions = parts.gate, list(parts.decisions)
    known = [each for each in decisions if each.figures.cached is not None and each.figures.prompt_tokens]
    fleet = parts.settings.fleet
    return {
        "policy": fleet.policy,
        "draining": gate.closed,
        "running": gate.open,
        "waiting": gate.waiting,
        "rejected": sum(gate.rejected.values()),
        "rejected_by": gate.rejected,
        "prompt_tokens": sum(each.figures.prompt_tokens for each in known),
        "cached_tokens": sum(each.figures.cached or 0 for each in known),
        "told": len(known),
        "workers_file_error": parts.workers_file.error if parts.workers_file is not None else "",
        "workers": [shown(worker, now) for worker in parts.fleet],
        "decisions": [_brief(each) for each in decisions[:SHOWN]],
    }


def _brief(decision: Decision) -> dict[str, Any]:
    last = decision.tries[-1]
    return {
        "rid": decision.rid,
        "at": decision.at,
        "names": last.names,
        "tokens": decision.prompt_tokens,
        "hits": decision.hits,
        "cached": decision.figures.cached,
        "estimated_ttft_s": last.chosen.ttft_s,
        "ttft_s": decision.ttft_s,
        "tries": len(decision.tries),
        "outcome": decision.outcome,
        "reason": decision.error or last.reason,
    }


ROUTES = (web.get("/events", events, allow_head=False),)
