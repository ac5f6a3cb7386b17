"""One client's request, from its place at the gate to the last byte of its answer.

A try is: choose, open the leg or the pair, wait for the first byte. Tries repeat, elsewhere, only before the first byte has gone to the
client. Invariants: a client gets one answer or one error, never silence: what breaks later ends a stream with an error event; nothing
waits without a deadline; whatever is opened here is closed here, also when the client hangs up. Called by the routes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from aiohttp import hdrs, web

from radixpd.errors import DeadlineExceeded, Overloaded, PeerFailed, RadixpdError
from radixpd.mini_lb.admission import Slo
from radixpd.mini_lb.ask import Ask, read_ask
from radixpd.mini_lb.decisions import DECISION, Attempt, Decision, Decisions
from radixpd.mini_lb.dispatch import Dispatcher
from radixpd.mini_lb.fleet import Fleet
from radixpd.mini_lb.gate import Gate
from radixpd.mini_lb.legs import Answer, Legs
from radixpd.mini_lb.metrics import Metrics
from radixpd.mini_lb.pd import pair
from radixpd.mini_lb.prompts import Prompts
from radixpd.mini_lb.relay import Books, relay
from radixpd.mini_lb.retry import Retries
from radixpd.mini_lb.settings import DoorSettings, LbSettings
from radixpd.mini_lb.snapshot import Choice
from radixpd.mini_lb.tenants import BY_USER, tenant
from radixpd.mini_lb.upstream import LegFailed, Outgoing, Upstream, request_headers
from radixpd.runtime.caller import caller
from radixpd.server.wire import read_bytes

__all__ = ["Proxy"]

MOST_WORDS = 300  # of a failure that is remembered: a worker may have said anything
Without = frozenset[str]
Try = tuple[Answer, Books | None]

logger = logging.getLogger(__name__)


class Proxy:
    """Everything that a request passes through."""

    def __init__(
        self,
        settings: LbSettings,
        *,
        fleet: Fleet,
        upstream: Upstream,
        dispatcher: Dispatcher,
        gate: Gate,
        metrics: Metrics,
        decisions: Decisions,
        prompts: Prompts,
    ) -> None:
        self._door = settings.door
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._gate = gate
        self._metrics = metrics
        self._decisions = decisions
        self._prompts = prompts
        self._slo = _limits(settings.door)
        self._session_header = settings.fleet.session_header
        self._retries = Retries(settings.retry, random.uniform)
        self._legs = Legs(fleet, upstream, self._retries.covers)
        forward, key = settings.fleet.forward_api_key, settings.fleet.worker_api_key
        self._pass_key = forward or not (self._door.api_key or self._door.admin_api_key)
        self._key = None if forward or key is None else key.reveal()
        self._deadlines: set[asyncio.Timeout] = set()
        self._stopping = False

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A request that a policy sends to a worker, or to a pair."""
        decision = request[DECISION] = self._decisions.begin(caller().id, request.path, time.monotonic())
        try:
            response = await self._admitted(request, decision)
        except RadixpdError as error:
            decision.error, decision.refused = str(error), isinstance(error, Overloaded)
            raise
        if response.status == 200:
            self._metrics.ended(time.monotonic() - decision.arrived)
        return response

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """A request that any worker can answer."""
        if not {".", ".."}.isdisjoint(request.path.split("/")):  # whatever resolves them on the way would come out at another route
            raise web.HTTPNotFound
        async with self._deadline():
            body = await self.body(request) if request.can_read_body else None
            return await self._answer(request, partial(self._any, self.outgoing(request), body))

    def outgoing(self, request: web.Request) -> Outgoing:
        """What goes to a worker, but for the body."""
        headers = request_headers(request.headers, request_id=caller().id, key=self._key, pass_key=self._pass_key)
        # RFC 9112, 3.2.2: a client may name this host in front of the path.
        path = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs
        return Outgoing(request.method, path, headers)

    async def body(self, request: web.Request) -> bytes:
        """The request's body, within its limits."""
        return await read_bytes(request, most=self._door.max_body_size, seconds=self._door.body_timeout)

    def stop(self) -> None:
        """End what is open, now."""
        self._stopping = True
        for deadline in self._deadlines:
            deadline.reschedule(asyncio.get_running_loop().time())

    async def _admitted(self, request: web.Request, decision: Decision) -> web.StreamResponse:
        """The answer, once the request has had its turn."""
        fair_by = self._door.fair_by
        ask = await self._ask(request) if fair_by == BY_USER else None
        who = tenant(fair_by, request.headers, ask) if fair_by else ""
        async with self._gate.place(who) as decision.waited_s, self._deadline():
            ask = ask or await self._ask(request)
            decision.stream, decision.tokens = ask.route.stream, ask.route.tokens
            self._retries.arrived()
            return await self._answer(request, partial(self._chosen, ask, self.outgoing(request), decision))

    async def _ask(self, request: web.Request) -> Ask:
        key = f"Bearer {self._key}" if self._key is not None else request.headers.get(hdrs.AUTHORIZATION, "") if self._pass_key else ""
        session = request.headers.get(self._session_header, "")
        ask = read_ask(await self.body(request), rid=caller().id, session=session)
        return await self._prompts.read(request.path, ask, authorization=key)

    # ---- tries ----------------------------------------------------------------------------------------------------

    async def _answer(self, request: web.Request, attempt: Callable[[Without], AbstractAsyncContextManager[Try]]) -> web.StreamResponse:
        """Try until an answer has begun, or nothing is left to try."""
        failures: list[LegFailed] = []
        while True:
            try:
                async with attempt(frozenset(failure.worker for failure in failures)) as (answer, books):
                    return await relay(request, self._legs, answer, books)
            except LegFailed as error:
                failures.append(error)
                logger.warning("request %s, try %d: worker %s", caller().id, len(failures), error)
            except Overloaded:
                if not failures:
                    raise
                return _given_up(failures[-1])  # nobody is left
            failure = failures[-1]
            if not failure.retryable or not self._elsewhere(failures) or not self._retries.again(len(failures), sent=failure.sent):
                return _given_up(failure)
            self._metrics.retried("status" if failure.reply else "broken" if failure.sent else "unreached")
            await asyncio.sleep(self._retries.wait(len(failures)))

    def _elsewhere(self, failures: Sequence[LegFailed]) -> bool:
        """Whether somebody else may try. What a busy worker refuses goes to its like only: prefill servers that decode for full decode
        servers, or the other way round, would soon be full themselves."""
        last = failures[-1]
        others = self._fleet.usable(without=frozenset(failure.worker for failure in failures))
        return any(last.reply is None or worker.spec.role == self._fleet.role(last.worker) for worker in others)

    @asynccontextmanager
    async def _chosen(self, ask: Ask, outgoing: Outgoing, decision: Decision, without: Without) -> AsyncIterator[Try]:
        """A try at whom the policy chooses."""
        now = time.monotonic()
        choice = self._dispatcher.pick(ask.route, self._fleet.snapshots(now, without=without), now)
        tried = self._write_down(decision, choice, now)
        if not without:  # what is tried again has been paid for in part
            self._check_limits(decision, choice, now)
        books = Books(decision, self._dispatcher.dispatched(ask.route, choice, now), self._metrics.first_token)
        try:
            async with (
                pair(self._legs, prefill=choice.worker, decode=choice.decode, outgoing=outgoing, ask=ask, prefilled=books.prefilled)
                if choice.disaggregated
                else self._legs.alone(choice.worker, outgoing, ask.body)
            ) as answer:
                yield answer, books
        except LegFailed as error:
            tried.failure = str(error)[:MOST_WORDS]
            raise
        finally:
            books.close()

    def _write_down(self, decision: Decision, choice: Choice, now: float) -> Attempt:
        if not decision.tries:
            self._decisions.remember(decision)
        names = self._fleet.short(choice.worker)
        return decision.tried(choice, f"{names}+{self._fleet.short(choice.decode)}" if choice.decode else names, now)

    def _check_limits(self, decision: Decision, choice: Choice, now: float) -> None:
        """Refuse, before anybody computes for it, what would come too late."""
        if self._slo is None:
            return
        miss = self._dispatcher.refusal(choice, self._slo, now, waited_s=decision.waited_s)
        if miss is not None:
            raise self._gate.refusal(f"slo_{miss.limit}", f"{miss} (--slo-{miss.limit}-ms)", retry_after=miss.retry_after)

    @asynccontextmanager
    async def _any(self, outgoing: Outgoing, body: bytes | None, without: Without) -> AsyncIterator[Try]:
        """A try at any worker; prefill servers only where there is nobody else."""
        if not (usable := self._fleet.usable(without=without)):
            raise Overloaded("no worker is available")
        front = [worker for worker in usable if worker.spec.role != "prefill"]
        async with self._legs.alone(random.choice(front or usable).name, outgoing, body) as answer:
            yield answer, None

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        """The request's time, which is over at once when the balancer stops."""
        deadline = asyncio.timeout(self._door.request_timeout)
        try:
            async with deadline:
                self._deadlines.add(deadline)
                yield
        except TimeoutError:
            if not deadline.expired():
                raise
            if self._stopping:
                raise Overloaded("the load balancer is shutting down") from None
            raise DeadlineExceeded(f"the request was not finished within {self._door.request_timeout:g} s (--request-timeout)") from None
        finally:
            self._deadlines.discard(deadline)


def _limits(door: DoorSettings) -> Slo | None:
    if door.slo_ttft_ms is None and door.slo_tpot_ms is None:
        return None
    return Slo((door.slo_ttft_ms or 0.0) / 1e3, (door.slo_tpot_ms or 0.0) / 1e3)


def _given_up(failure: LegFailed) -> web.Response:
    """The worker's own error as it gave it, or ours."""
    if failure.reply is None:
        raise PeerFailed(f"no worker could answer: the last one {failure.reason}")
    return web.Response(status=failure.reply.status, headers=failure.reply.headers, body=failure.reply.body)
