"""`GET /explain?rid=`: why a request went where it went, and what became of it.

`rid` is what the answer's X-Request-Id said. Invariant: reading changes nothing, and shows no prompt. `board` shows the same decisions in
short. Called by the application's router.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from radixpd.errors import BadRequest
from radixpd.mini_lb.decisions import Attempt, Decision
from radixpd.mini_lb.parts import parts_of
from radixpd.mini_lb.snapshot import Candidate, Hits
from radixpd.server.wire import json_reply

__all__ = ["ROUTES", "explain"]


async def explain(request: web.Request) -> web.Response:
    """GET /explain?rid=."""
    rid = request.query.get("rid", "")
    if not rid:
        raise BadRequest("rid is missing: give the X-Request-Id of an answer, as in /explain?rid=ID", param="rid")
    decisions = parts_of(request).decisions
    found = decisions.find(rid)
    if found is None:
        message = f"no request {rid[:128]} among the last {len(decisions)} that came to a choice"
        raise BadRequest(message, param="rid", status=404)
    return json_reply(_explained(found))


def _explained(decision: Decision) -> dict[str, Any]:
    last, figures = decision.tries[-1], decision.figures
    return {
        "rid": decision.rid,
        "path": decision.path,
        "at": decision.at,
        "outcome": decision.outcome,
        "status": decision.status or None,
        "error": decision.error or None,
        "reason": last.reason,
        "stream": decision.stream,
        "waited_s": decision.waited_s,
        "estimated_ttft_s": last.chosen.ttft_s,
        "ttft_s": decision.ttft_s,
        "duration_s": decision.duration_s or None,
        "estimated_prompt_tokens": decision.tokens,
        "prompt_tokens": figures.prompt_tokens or None,
        "cached_tokens": figures.cached,
        "output_tokens": figures.output_tokens or None,
        "tries": [_tried(each, decision) for each in decision.tries],
    }


def _tried(tried: Attempt, decision: Decision) -> dict[str, Any]:
    return {
        "names": tried.names,
        "after_s": tried.begun - decision.arrived,
        "reason": tried.reason,
        "failure": tried.failure or None,
        "candidates": [_candidate(each) for each in tried.candidates],
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    """The first one is the chosen one. The estimate is the sum of the first four parts; the score weighs them and adds the prices."""
    return {
        "worker": candidate.worker,
        "decode": candidate.decode or None,
        "score": candidate.score,
        "ttft_s": candidate.ttft_s,
        "tpot_s": candidate.tpot_s,
        "parts": {
            "queue_s": candidate.queue_s,
            "prefill_s": candidate.prefill_s,
            "transfer_s": candidate.transfer_s,
            "decode_s": candidate.decode_s,
            "evict_s": candidate.evict_s,
            "imbalance_s": candidate.imbalance_s,
        },
        "hits": _hits(candidate.hits),
        "decode_hits": _hits(candidate.decode_hits) if candidate.decode else None,
    }


def _hits(hits: Hits) -> dict[str, Any]:
    """By tier; `exact`: from the worker's own events, else from what was sent there."""
    return {"device": hits.device, "host": hits.host, "exact": hits.exact}


ROUTES = (web.get("/explain", explain),)
