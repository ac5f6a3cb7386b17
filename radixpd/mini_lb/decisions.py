"""What was decided about each request, and what became of it: the last ones, for whoever asks why.

A `Decision` is begun when a request arrives and enters the ring with its first choice, so that a flood of refusals pushes out nothing.
Invariants: the ring is bounded in requests and in candidates of each; no prompt and no key is kept; a choice is written down as it was
made, and shown in words only when somebody asks. Called by the proxy; read by `explain_api`, `board` and the request log.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from aiohttp import web

from radixpd.mini_lb.answers import Figures
from radixpd.mini_lb.snapshot import Candidate, Choice

__all__ = ["CLIENT_CLOSED", "DECISION", "ROUTE_HEADER", "Attempt", "Decision", "Decisions", "tell_route"]

MOST = 1000  # requests that are remembered
MOST_CANDIDATES = 16  # of one choice: of many pairs the best
CLIENT_CLOSED = 499
ROUTE_HEADER = "X-Radixpd-Route"
NO_FIGURES = Figures()


@dataclass(slots=True, eq=False)
class Attempt:
    """One choice. `names`: short ones of the worker or of the pair; `failure`: why it came to nothing, if it did."""

    reason: str
    names: str
    candidates: tuple[Candidate, ...]
    begun: float
    failure: str = ""

    @property
    def chosen(self) -> Candidate:
        """The estimates of the chosen worker or pair."""
        return self.candidates[0]


@dataclass(slots=True, eq=False)
class Decision:
    """One request. `arrived`: by the monotonic clock; `at`: by the calendar's; `error`: what ended it; `refused`: that was the balancer."""

    rid: str
    path: str
    arrived: float
    at: float
    stream: bool = False
    tokens: int = 0  # of the prompt, as estimated
    waited_s: float = 0.0  # for a place
    tries: list[Attempt] = field(default_factory=list)
    ttft_s: float | None = None  # of a stream
    figures: Figures = NO_FIGURES  # as the worker says
    error: str = ""
    refused: bool = False
    status: int = 0  # 0 while it is open
    duration_s: float = 0.0

    @property
    def outcome(self) -> str:
        """One word, or two."""
        if not self.status:
            return "open"
        if self.status == CLIENT_CLOSED:
            return "hung up"
        if self.status < 400:
            return "broken off" if self.error else "ok"
        return "refused" if self.refused else "failed"

    @property
    def prompt_tokens(self) -> int:
        """As the worker says, or as estimated."""
        return self.figures.prompt_tokens or self.tokens

    @property
    def hits(self) -> int:
        """Tokens of the prompt that the chosen worker was expected to have."""
        return self.tries[-1].chosen.hits.tokens if self.tries else 0

    def tried(self, choice: Choice, names: str, now: float) -> Attempt:
        """One more choice."""
        made = Attempt(choice.reason, names, choice.candidates[:MOST_CANDIDATES], now)
        self.tries.append(made)
        return made

    def ended(self, status: int, now: float) -> None:
        """The answer is over."""
        self.status, self.duration_s = status, now - self.arrived

    def header(self) -> str:
        """The last choice as the value of a header: a token with parameters, as RFC 9651 has them."""
        last = self.tries[-1]
        chosen = last.chosen
        decode = f";decode_hit={chosen.decode_hits.tokens}" if chosen.decode else ""
        return (
            f"{last.names};hit={chosen.hits.tokens}{decode};tokens={self.tokens};est_ms={1000 * chosen.ttft_s:.1f}"
            f';tries={len(self.tries)};reason="{last.reason}"'
        )


class Decisions:
    """The last `most` requests that came to a choice."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._last: OrderedDict[str, Decision] = OrderedDict()

    def begin(self, rid: str, path: str, now: float) -> Decision:
        """A request has arrived; nothing is remembered of it yet."""
        return Decision(rid, path, now, time.time())

    def remember(self, decision: Decision) -> None:
        """It has come to a choice. A rid that a client uses again means its latest request."""
        self._last.pop(decision.rid, None)
        self._last[decision.rid] = decision
        if len(self._last) > self._most:
            self._last.popitem(last=False)

    def find(self, rid: str) -> Decision | None:
        """By the name that the answer's X-Request-Id told."""
        return self._last.get(rid)

    def __iter__(self) -> Iterator[Decision]:
        """The newest first."""
        return reversed(self._last.values())

    def __len__(self) -> int:
        return len(self._last)


DECISION: web.RequestKey[Decision] = web.RequestKey("decision", Decision)


async def tell_route(request: web.Request, response: web.StreamResponse) -> None:
    """Put the choice on the answer, whoever gives it: a plain one, a stream, an error."""
    decision = request.get(DECISION)
    if decision is not None and decision.tries:
        response.headers[ROUTE_HEADER] = decision.header()
