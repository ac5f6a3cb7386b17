"""The workers: who they are, whether they live, how busy they are, and how many of our requests each has.

Every worker is looked at by a task of its own: `/health`, then `/get_load`, and `/server_info` of a process that was not seen before.
Invariant: a request holds a `Lease` on its worker from choice to end, and every way out gives it back, so counts cannot drift; a worker
that drains gets no new requests and leaves with its last one. A worker that says so, or whose step count has fallen, is another process
under the same name: what was known of it is forgotten. Called by the proxy and the routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from radixpd.errors import BadRequest
from radixpd.mini_lb.breaker import Breaker, BreakerRules, State, Ticket
from radixpd.mini_lb.card import Card, read_card
from radixpd.mini_lb.dispatch import Dispatcher
from radixpd.mini_lb.listen import Listeners
from radixpd.mini_lb.load_report import LoadReport, read_load
from radixpd.mini_lb.prompts import Prompts
from radixpd.mini_lb.settings import FleetSettings, WorkerSpec
from radixpd.mini_lb.snapshot import Role, WorkerSnapshot
from radixpd.mini_lb.upstream import Upstream

__all__ = ["Fleet", "Lease", "Worker"]

JITTER = 0.1  # of the time between two looks: balancers that started together do not look together

logger = logging.getLogger(__name__)


class Worker:
    """One worker as it looks now."""

    def __init__(self, spec: WorkerSpec, breaker: Breaker, short: str, hears: Callable[[], bool]) -> None:
        self.spec = spec
        self.hears = hears  # whether its events are heard, so that its cache is known
        self.short = short  # what answers to clients call it: an address would tell too much
        self.breaker = breaker
        self.up = False
        self.draining = False
        self.load = LoadReport()
        self.card: Card | None = None  # what the worker says of itself, where it does
        self.open = 0  # leases
        self.incarnation = 1  # counts the processes that were seen under this name
        self.outcomes = {"ok": 0, "fault": 0, "neutral": 0}
        self.looks = 0  # good ones in a row, or as a negative number failed ones
        self.suspect = asyncio.Event()  # look now
        self.turned: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done when its role has become another

    @property
    def name(self) -> str:
        """Its URL: unique, and the same after a restart."""
        return self.spec.url

    def usable(self, now: float) -> bool:
        """Whether a new request may go there."""
        return self.up and not self.draining and self.breaker.allows(now)

    def snapshot(self, now: float) -> WorkerSnapshot:
        """For the policies."""
        load = self.load
        return WorkerSnapshot(
            name=self.name,
            url=self.spec.url,
            role=self.spec.role,
            usable=self.usable(now),
            events=self.hears(),
            running=load.running,
            waiting=load.waiting,
            max_running=load.max_running,
            kv_tokens=load.kv_tokens,
            free_tokens=load.free_tokens,
        )

    def state(self, now: float) -> str:
        """One word for people."""
        if self.draining:
            return "draining"
        if not self.up:
            return "down"
        return "up" if self.breaker.state(now) is State.CLOSED else "circuit " + self.breaker.state(now).value.replace("_", "-")


class Lease:
    """One request at one worker."""

    def __init__(self, worker: Worker, ticket: Ticket) -> None:
        self.worker = worker
        self._ticket = ticket
        self.ok: bool | None = None  # the verdict at the end; None: nothing is known against the worker, or for it

    def answered(self) -> None:
        """The worker has begun to answer, and not with a fault."""
        self.worker.breaker.answered(self._ticket)

    def end(self, now: float) -> None:
        worker = self.worker
        worker.breaker.end(self._ticket, self.ok, now)
        worker.outcomes["neutral" if self.ok is None else "ok" if self.ok else "fault"] += 1
        if self.ok is False:
            worker.suspect.set()


class Fleet:
    """All workers. `start` and `close` belong to the loop that serves."""

    def __init__(
        self, settings: FleetSettings, specs: Sequence[WorkerSpec], *, upstream: Upstream, dispatcher: Dispatcher, prompts: Prompts
    ) -> None:
        self._settings = settings
        self._upstream = upstream
        self._dispatcher = dispatcher
        self._prompts = prompts
        self._listeners = Listeners(dispatcher.feed)
        self._rules = BreakerRules(
            failures=settings.cb_failure_threshold,
            successes=settings.cb_success_threshold,
            seconds=settings.cb_timeout_duration_secs,
            most=settings.cb_max_timeout_duration_secs,
        )
        self._workers: dict[str, Worker] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._joined = 0
        self._first = list(specs)

    def start(self) -> None:
        """Begin to look at the workers that the flags name."""
        for spec in self._first:
            self.add(spec)

    async def close(self) -> None:
        """Look no more."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listeners.close()
        await self._prompts.close()

    # ---- who is there ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def usable(self, *, without: frozenset[str] = frozenset()) -> list[Worker]:
        """Who may get a new request now."""
        now = time.monotonic()
        return [worker for name, worker in self._workers.items() if name not in without and worker.usable(now)]

    def role(self, name: str) -> Role | None:
        """Of a worker, None if it has left."""
        worker = self.find(name)
        return None if worker is None else worker.spec.role

    def find(self, name: str) -> Worker | None:
        """The worker with this URL, None if it is not there."""
        return self._workers.get(name)

    def short(self, name: str) -> str:
        """What answers to clients call the worker."""
        return self._workers[name].short

    def snapshots(self, now: float, *, without: frozenset[str] = frozenset()) -> list[WorkerSnapshot]:
        """For the policies."""
        return [worker.snapshot(now) for name, worker in self._workers.items() if name not in without]

    def add(self, spec: WorkerSpec) -> Worker:
        """A worker joins, or one that was leaving stays. It gets requests once it has been seen healthy."""
        worker = self._workers.get(spec.url)
        if worker is not None:
            if not worker.draining or worker.spec != spec:
                raise BadRequest(f"url: {spec.url} is in the fleet already", param="url", status=409)
            worker.draining = False
            return worker
        breaker = Breaker(self._rules, random.uniform)
        self._joined += 1
        short = f"{'w' if spec.role == 'regular' else spec.role[0]}{self._joined}"
        worker = self._workers[spec.url] = Worker(spec, breaker, short, partial(self._listeners.hears, spec.url))
        task = self._tasks[spec.url] = asyncio.create_task(self._watch(worker))
        task.add_done_callback(_watched)
        return worker

    def drain(self, name: str) -> Worker:
        """The worker gets no more requests, and leaves when it has none."""
        worker = self._workers.get(name)
        if worker is None:
            raise BadRequest(f"no worker has the url {name[:200]}", param="url", status=404)
        worker.draining = True
        self._leave(worker)
        return worker

    @contextlib.contextmanager
    def lease(self, name: str) -> Iterator[Lease]:
        """A request goes to this worker; its end is the block's."""
        worker = self._workers[name]
        lease = Lease(worker, worker.breaker.begin(time.monotonic()))
        worker.open += 1
        try:
            yield lease
        finally:
            worker.open -= 1
            lease.end(time.monotonic())
            self._leave(worker)

    def _leave(self, worker: Worker) -> None:
        if not worker.draining or worker.open or self._workers.get(worker.name) is not worker:
            return
        del self._workers[worker.name]
        if (task := self._tasks.pop(worker.name, None)) is not None:
            task.cancel()
        self._tell(worker, None)
        self._dispatcher.forget(worker.name, time.monotonic())
        logger.info("worker %s has left the fleet", worker.name)

    # ---- how they are ----------------------------------------------------------------------------------------------------

    async def _watch(self, worker: Worker) -> None:
        """Look at one worker until it leaves."""
        interval = self._settings.health_check_interval_secs
        while True:
            worker.suspect.clear()
            self._seen(worker, await self._healthy(worker))
            if worker.up:
                await self._read_load(worker)
            # Not wait_for, which in Python 3.11 loses a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval * random.uniform(1 - JITTER, 1 + JITTER)):
                    await worker.suspect.wait()
                # However many requests fail there: not more looks than these.
                await asyncio.sleep(min(interval, 0.05))

    async def _healthy(self, worker: Worker) -> bool:
        status, _ = await self._upstream.look(worker.spec.url + "/health", seconds=self._settings.health_check_timeout_secs)
        return status == 200

    def _seen(self, worker: Worker, healthy: bool) -> None:
        """Count looks in a row, and change the worker's state when there are enough."""
        worker.looks = max(worker.looks, 0) + 1 if healthy else min(worker.looks, 0) - 1
        if healthy and not worker.up and worker.looks >= self._settings.health_success_threshold:
            worker.up = True
            worker.breaker.reset()
            logger.info("worker %s is up", worker.name)
        elif not healthy and worker.up and -worker.looks >= self._settings.health_failure_threshold:
            worker.up = False
            logger.warning("worker %s is down: %d looks at its /health failed", worker.name, -worker.looks)

    async def _read_load(self, worker: Worker) -> None:
        status, body = await self._upstream.look(worker.spec.url + "/get_load", seconds=self._settings.health_check_timeout_secs)
        if status != 200:
            return
        load = read_load(body)
        now = time.monotonic()
        if load.by_another_than(worker.load):
            worker.incarnation += 1
            worker.breaker.reset()
            self._tell(worker, None)
            self._dispatcher.forget(worker.name, now)
            logger.info("worker %s has been restarted", worker.name)
        worker.load = load
        self._dispatcher.reported(worker.snapshot(now), now)
        card = worker.card
        if load.incarnation and (card is None or (card.incarnation, card.role) != (load.incarnation, load.role)):
            await self._read_card(worker)

    async def _read_card(self, worker: Worker) -> None:
        """Who the worker is, after a start or a change of its role."""
        status, body = await self._upstream.look(worker.spec.url + "/server_info", seconds=self._settings.health_check_timeout_secs)
        card = read_card(body, worker.spec.url) if status == 200 else None
        if card is None:
            return
        if "regular" not in (worker.spec.role, card.role) and card.role != worker.spec.role:
            worker.spec = replace(worker.spec, role=card.role, bootstrap_port=card.bootstrap_port)
            worker.turned.set_result(None)
            worker.turned = asyncio.get_running_loop().create_future()
            logger.info("worker %s is a %s server now", worker.name, card.role)
        self._tell(worker, card)

    def _tell(self, worker: Worker, card: Card | None) -> None:
        """Of a worker's process, to those who listen to it and tokenize for it. A change of role leaves it the process that it was."""
        same = card is not None and worker.card is not None and card.incarnation == worker.card.incarnation
        worker.card = card
        if not self._dispatcher.policies.exact:
            return
        if not same:
            self._listeners.told(worker.name, card.events if card is not None else None)
        self._prompts.told(worker.name, card)


def _watched(task: asyncio.Task[None]) -> None:
    """Nobody waits for these tasks: a bug in one must show."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a worker is no longer looked at", exc_info=error)
