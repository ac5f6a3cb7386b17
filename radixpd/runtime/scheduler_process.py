"""The scheduler process: the brain between its sockets. No torch here.

One turn of the loop: take what the API and the runner sent, plan steps while the brain has one to give, hand out effects. It waits only
when a turn moved nothing, in one poll. Invariants: one `Batch` per turn, the first `Load` means ready, from then on one comes at least
every second (its heartbeat), a step that takes longer than the watchdog allows ends the group. Started by the supervisor as
`python -m radixpd.runtime.scheduler_process`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import zmq

from radixpd.config.resolve import Resolved, from_json
from radixpd.core.effects import CacheEvent, ClientEffect, Finished, Prefilled, PromptScored, TokensOut
from radixpd.core.grammars import WantGrammar
from radixpd.core.scheduler import Scheduler
from radixpd.errors import EngineFailed
from radixpd.runtime import child
from radixpd.runtime.controls import Controls
from radixpd.runtime.disaggregation import make_role, mode_of
from radixpd.runtime.kv_events import Publisher
from radixpd.runtime.links import Addresses, Receiver, Sender
from radixpd.runtime.load_feed import LoadFeed
from radixpd.runtime.messages import (
    Abort,
    Batch,
    Control,
    Failed,
    Forget,
    FromApi,
    FromRunner,
    Generate,
    Made,
    Refused,
    Reply,
    RunnerReady,
    Shutdown,
    Step,
    Stepped,
    Stop,
    Want,
)  # fmt: skip
from radixpd.runtime.step_log import StepLog
from radixpd.runtime.ties import Alone, Ties, open_ties
from radixpd.runtime.watchdog import BEAT, Pulse

__all__ = ["Links", "Loop", "batch", "main"]

STANDSTILL = 3.0  # seconds between two turns, which come several times a second
LINGER_MS = 1000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Links:
    """The scheduler's four sockets."""

    from_api: Receiver[FromApi]
    to_api: Sender
    from_runner: Receiver[FromRunner]
    to_runner: Sender

    @staticmethod
    def open(context: zmq.Context[Any], addresses: Addresses) -> Links:
        """Bind what the scheduler binds, connect the rest; peers may come later."""
        return Links(
            from_api=Receiver(context, addresses.to_scheduler, FromApi, bind=True),
            to_api=Sender(context, addresses.to_api),
            from_runner=Receiver(context, addresses.from_runner, FromRunner, bind=True),
            to_runner=Sender(context, addresses.to_runner(0)),
        )


class Loop:
    """Runs one scheduler until `Shutdown`. Raises `EngineFailed` when the group must end."""

    def __init__(
        self,
        scheduler: Scheduler,
        links: Links,
        *,
        resolved: Resolved,
        events: Publisher | None,
        pulse: Pulse,
        ties: Ties | None = None,
        poller: zmq.Poller | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._links = links
        self._ties = ties or Alone()
        self._events = events
        self._pulse = pulse
        self._pages = resolved.pages
        self._seed = resolved.seed
        self._watchdog = resolved.settings.server.watchdog_timeout
        self._log = StepLog(resolved.settings.scheduler.decode_log_interval)
        self._controls = Controls(
            scheduler,
            to_api=links.to_api,
            to_runner=links.to_runner,
            ties=self._ties,
            make_role=partial(make_role, resolved=resolved),
        )
        self._ready = False
        self._stopping = False
        self._plans = 0
        self._progress = 0.0  # when the runner last answered, or got work after a pause
        self._turned = 0.0
        self._loads = LoadFeed(scheduler, links.to_api)
        self._poller = poller or zmq.Poller()
        for socket in (links.from_api.socket, links.from_runner.socket, events.replay if events else None, child.CONTROL_FD):
            if socket is not None:
                self._poller.register(socket, zmq.POLLIN)

    def run(self) -> None:
        """Turn until the API says `Shutdown` and everything queued has finished."""
        while not (self._stopping and self._is_finished()):
            if not self.turn(time.monotonic()):
                self._wait()
        self._links.to_runner.send(Shutdown())

    def turn(self, now: float) -> bool:
        """Do everything that can be done without waiting; whether that was anything."""
        self._pulse.beat()
        if now - self._turned > STANDSTILL:
            # Time in which this process did not run, most likely none did (a machine asleep, a container paused), proves nothing.
            self._progress += now - self._turned
        self._turned = now
        moved = self._take_from_api(now)
        moved |= self._take_from_runner(now)
        moved |= self._ties.take(now)
        self._controls.answer_flushes()
        moved |= self._plan(now)
        self._hand_out(now)
        self._controls.answer_pauses()
        self._controls.answer_switches(now)
        if self._ready:
            self._loads.turn(now, moved=moved)
        self._check_watchdog(now)
        return moved

    def _take_from_api(self, now: float) -> bool:
        moved = False
        for message in self._links.from_api.drain():
            moved = True
            match message:
                case Generate():
                    self._scheduler.arrive(
                        message.rids,
                        message.prompt,
                        message.params,
                        namespace=message.namespace,
                        priority=message.priority,
                        now=min(message.arrived, now),
                        room=message.room,
                    )
                case Refused(room, text, status):
                    self._scheduler.refuse(room, text, status, now)
                case Abort(rid, text, status):
                    self._scheduler.abort(rid, text, status, now)
                case Stop(rid, keep, matched):
                    self._scheduler.stop(rid, keep, matched, now)
                case Control():
                    self._controls.take(message, now)
                case Shutdown():
                    self._stopping = True
        return moved

    def _take_from_runner(self, now: float) -> bool:
        moved = False
        for message in self._links.from_runner.drain():
            moved = True
            match message:
                case Stepped(result):
                    self._scheduler.apply(result, now)
                    self._progress = now
                case Made(id, error, status):
                    self._scheduler.grammar_answered(id, error, status, now)
                case Reply():
                    self._links.to_api.send(message)
                case RunnerReady(pages):
                    if pages != self._pages:
                        raise EngineFailed(f"the model runner has {pages} KV pages where {self._pages} were decided")
                    self._scheduler.identify(message.fingerprint)
                    self._ties.identify(message)
                    logger.info("the model runner is ready after %.1f s", message.load_seconds)
                    self._links.to_api.send(message)
                    self._ready = self._controls.ready = True
                case Failed(text):
                    raise EngineFailed(text)
        return moved

    def _plan(self, now: float) -> bool:
        if not self._ready:
            return False
        moved = False
        while (plan := self._scheduler.plan(now, self._seed + self._plans)) is not None:
            if self._scheduler.in_flight <= 1:
                self._progress = now
            # What this plan writes into may be what a room that has just ended was sent from.
            self._ties.order(self._scheduler.take_orders())
            self._links.to_runner.send(Step(plan, self._ties.take_ended()))
            self._plans += 1
            self._log.planned(self._scheduler, now)
            moved = True
        if self._scheduler.in_flight == 0:
            self._log.idle()
        return moved

    def _hand_out(self, now: float) -> None:
        effects = self._scheduler.drain()
        self._ties.order(effects.mover)
        self._ties.tell(effects.peer, now)
        for order in effects.grammars:
            self._links.to_runner.send(Want(order.id, order.grammar) if isinstance(order, WantGrammar) else Forget(order.grammar))
        if effects.client:
            self._links.to_api.send(batch(effects.client))
        if self._events is not None:
            self._events.publish(effects.cache, unix_time=time.time())
            self._events.answer_replays()

    def _check_watchdog(self, now: float) -> None:
        if self._scheduler.in_flight == 0 or now - self._progress < self._watchdog:
            return
        message = f"the runner process has not answered for {self._watchdog:g} s (--watchdog-timeout)"
        if not self._pulse.stuck(message):
            raise EngineFailed(message)
        self._progress = now  # the supervisor ends the group

    def _wait(self) -> None:
        now = time.monotonic()
        waits = [BEAT]
        if self._scheduler.in_flight:
            waits.append(self._progress + self._watchdog - now)
        if self._ready:
            waits.append(self._loads.next - now)
        # Rounded up: a timeout of 0 ms just before a deadline would spin.
        timeout = 0 if self._ties.has_news else max(0, int(min(waits) * 1000) + 1)
        if any(socket == child.CONTROL_FD for socket, _ in self._poller.poll(timeout)) and child.parent_is_gone():
            raise EngineFailed("the supervisor is gone")

    def _is_finished(self) -> bool:
        load = self._scheduler.load()
        return self._scheduler.in_flight == 0 and load.running + load.waiting + load.parked == 0


def batch(effects: Iterable[ClientEffect]) -> Batch:
    """Client effects by kind, each kind in the order it happened."""
    prefilled: list[Prefilled] = []
    scored: list[PromptScored] = []
    tokens: list[TokensOut] = []
    finished: list[Finished] = []
    for effect in effects:
        match effect:
            case Prefilled():
                prefilled.append(effect)
            case PromptScored():
                scored.append(effect)
            case TokensOut():
                tokens.append(effect)
            case Finished():
                finished.append(effect)
    return Batch(tuple(prefilled), tuple(scored), tuple(tokens), tuple(finished))


def _publisher(context: zmq.Context[Any], resolved: Resolved, cached: Callable[[], Iterable[CacheEvent]]) -> Publisher | None:
    asked = resolved.kv_events
    if asked is None:
        return None
    return Publisher(
        context,
        endpoint=asked.endpoint,
        replay_endpoint=asked.replay_endpoint,
        topic=asked.topic,
        page_size=resolved.page_size,
        cached=cached,
    )


def _body(launch: child.Launch) -> int:
    resolved = from_json(launch.resolved)
    context: zmq.Context[Any] = zmq.Context()
    peers_context: zmq.Context[Any] = zmq.Context()  # resolves host names in its thread, which may take long
    try:
        links = Links.open(context, Addresses(launch.directory))
        scheduler = Scheduler(
            resolved.settings.scheduler,
            resolved.settings.cache,
            pages=resolved.pages,
            context_length=resolved.context_length,
            eos_ids=resolved.eos_ids,
            role=make_role(mode_of(resolved), resolved),
        )
        events = _publisher(context, resolved, scheduler.cache.stored)
        poller = zmq.Poller()
        ties = open_ties(scheduler, resolved, Addresses(launch.directory), poller, context=context, peers_context=peers_context)
        try:
            Loop(scheduler, links, resolved=resolved, events=events, pulse=Pulse(launch.watch_fd), ties=ties, poller=poller).run()
        except (EngineFailed, msgspec.MsgspecError) as error:
            logger.error("ending the server: %s", error)
            links.to_api.send(Failed(str(error) if isinstance(error, EngineFailed) else "a message between processes was damaged"))
            return child.EXIT_FAILED
        return 0
    finally:
        context.destroy(linger=LINGER_MS)
        peers_context.destroy(linger=LINGER_MS)


def main() -> None:
    """Entry point of the process."""
    child.run("scheduler", _body)


if __name__ == "__main__":
    main()
