"""The scheduler's answers to what is asked of it beside requests: the `Control` messages, each answered by one `Reply`.

Most are answered at once. A flush and a pause wait for steps in flight, a change of role for peers too; the runner's own go through to it.
Invariant: a client that has its answer finds what it ordered in the next `Load` that the API process reads. Called by the scheduler's loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from radixpd.core.roles import MakeRole
from radixpd.core.scheduler import PAUSE_MODES, Scheduler
from radixpd.core.tree_view import cache_view
from radixpd.errors import ConfigError
from radixpd.runtime.links import Sender
from radixpd.runtime.messages import Control, Load, Reply
from radixpd.runtime.orders import ORDERS, obey
from radixpd.runtime.ties import Ties

__all__ = ["Controls"]

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 20.0  # that a change of role waits for peers
PAUSES = {f"pause_{mode}": mode for mode in PAUSE_MODES}


class Controls:
    """What is asked and has no answer yet. `ready`: the runner is, and the API process reads loads."""

    def __init__(
        self, scheduler: Scheduler, *, to_api: Sender, to_runner: Sender, ties: Ties, make_role: Callable[[str], MakeRole]
    ) -> None:
        self.ready = False
        self._scheduler = scheduler
        self._to_api = to_api
        self._to_runner = to_runner
        self._ties = ties
        self._make_role = make_role
        self._flushes: list[int] = []
        self._pauses: list[int] = []
        self._switches: list[tuple[float, Control]] = []

    def take(self, order: Control, now: float) -> None:
        """Answer it, or keep it until it can be answered."""
        if order.to == "runner":
            self._pass_on(order)
        elif order.action == "flush_cache":
            self._flushes.append(order.id)
            self.answer_flushes()
        elif order.action == "switch_role":
            self._switches.append((now, order))
        elif order.action in PAUSES:
            self._scheduler.pause(PAUSES[order.action], now)
            self._pauses.append(order.id)
        else:
            self._to_api.send(self._answer(order, now))

    def answer_flushes(self) -> None:
        """A flush waits for steps in flight of requests that have ended (a client may flush right after an answer), never for a request."""
        if self._flushes and (self._scheduler.flush() or self._scheduler.in_use):
            error = "requests are running" if self._scheduler.in_use else ""
            if not error:
                # Before the answer, so that a client that has it reads an empty cache in /metrics.
                self._tell_load()
            for number in self._flushes:
                self._to_api.send(Reply(number, {}, error))
            self._flushes.clear()

    def answer_pauses(self) -> None:
        """Once the runner is still, and the clients have been told what it did last. A pause that is over is answered too."""
        if self._pauses and not (self._scheduler.paused and self._scheduler.in_flight):
            self._tell_load()
            for number in self._pauses:
                self._to_api.send(Reply(number, {}))
            self._pauses.clear()

    def answer_switches(self, now: float) -> None:
        """Once no request is open and no page is left that a peer may write into."""
        settled = self._scheduler.is_settled
        for asked, order in self._switches.copy():
            if settled or now - asked > SETTLE_SECONDS:
                self._switches.remove((asked, order))
                error = self._switch(str(order.args["role"])) if settled else "a peer may still write into pages of this server"
                self._to_api.send(Reply(order.id, {}, error))

    def _switch(self, role: str) -> str:
        """What went wrong, if anything."""
        try:
            self._ties.switch(role)
        except ConfigError as error:
            return str(error)
        self._scheduler.switch(self._make_role(role))
        logger.info("this is a %s server from now on", role)
        return ""

    def _answer(self, order: Control, now: float) -> Reply:
        number, action = order.id, order.action
        if action == "state":
            return Reply(number, self._scheduler.state(now, order.args.get("rids")))
        if action == "cache_tree":
            spares = [pages for each in self._scheduler.holdings.spares.values() for pages in each]
            view = cache_view(self._scheduler.cache, self._scheduler.table, spares)
            return Reply(number, msgspec.to_builtins(view, builtin_types=(bytes,)))
        if action == "continue":
            self._scheduler.resume()
            return Reply(number, {})
        if action in ORDERS:
            return Reply(number, obey(action, order.args))
        return Reply(number, {}, f"unknown action {action}")

    def _pass_on(self, order: Control) -> None:
        """Its reply comes back through the loop. Before the runner is ready it would answer too late to matter."""
        if self.ready:
            self._to_runner.send(order)
        else:
            self._to_api.send(Reply(order.id, {}, "the model runner is not ready yet"))

    def _tell_load(self) -> None:
        if self.ready:
            self._to_api.send(Load(self._scheduler.load()))
