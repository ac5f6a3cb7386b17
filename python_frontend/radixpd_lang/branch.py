"""One branch of a program: nodes wait here for their turn, and the values that they set are known before they are there.

The program's thread adds nodes and never waits; a task on the event loop hands them to the branch's `Interpreter`, one after the other, and
ends when there are none. After a failure every further node fails with the same error. Branches of a fork start when the nodes before the
fork are done. Called by `state`; the tasks belong to `Run`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from radixpd_lang.errors import ProgramError, ProgramTimeout
from radixpd_lang.interpreter import Interpreter, Mark
from radixpd_lang.ir import Gen, Node, RoleBegin, RoleEnd, Select
from radixpd_lang.place import Place
from radixpd_lang.run import Run
from radixpd_lang.values import Feed, Value

__all__ = ["Branch"]


@dataclass(frozen=True, slots=True)
class _Order:
    """Something to carry out: what and where the program asked for it, and who waits for it."""

    what: str
    place: Place
    work: Callable[[], Awaitable[None]]
    value: Value | None = None


class Branch:
    """`values`: variables by name, the latest of each; `bound`: names that this branch has set itself, `names` the same for those who wait
    for one; `nodes`: what it was told, when recording (a tuple is a fork)."""

    def __init__(self, run: Run, place: Place, *, path: tuple[int, ...] = (), values: dict[str, Value] | None = None) -> None:
        self.run = run
        self.place = place
        self.path = path
        self.values = values or {}
        self.bound: list[str] = []
        self.names = Feed()
        self.feed = Feed()
        self.failure: ProgramError | None = None
        self.origin = Value(None)  # the transcript at the fork
        self.nodes: list[Node | tuple[Branch, ...]] = []
        self._interpreter = Interpreter(run, path, self.feed)
        self._orders: deque[_Order] = deque()
        self._lock = threading.Lock()
        self._busy = False
        run.add(self)

    # In the program's thread

    def append(self, node: Node) -> None:
        """Carry out one more node, some time."""
        if self.run.options.recording:
            self.nodes.append(node)
        match node:
            case Gen() | Select():
                kind, do = ("gen", self._interpreter.gen) if isinstance(node, Gen) else ("select", self._interpreter.select)
                value = self._bind(node.name)
                what = kind if node.name is None else f"{kind} {node.name!r}"
                self._submit(_Order(what, node.place, partial(do, node, value), value))  # type: ignore[arg-type]
            case _:
                what = node.role if isinstance(node, (RoleBegin, RoleEnd)) else type(node).__name__.lower()
                self._submit(_Order(what, node.place, partial(self._interpreter.tell, node)))

    def fork(self, count: int, place: Place) -> list[Branch]:
        """Branches that start from here; the common prefix goes to the server once, before them."""
        origin = Value(None)
        self._submit(_Order("fork", place, partial(self._interpreter.fork, count, origin), origin))
        children = [Branch(self.run, place, path=(*self.path, index), values=dict(self.values)) for index in range(count)]
        for child in children:
            child.origin = origin
            child._submit(_Order("fork", place, partial(child._interpreter.inherit, origin)))
        if self.run.options.recording:
            self.nodes.append(tuple(children))
        return children

    def gather(self, children: Sequence[Branch], place: Place) -> None:
        """Each variable that a child has set becomes the list of what the children have."""
        for name in dict.fromkeys(name for child in children for name in child.bound):
            parts = [child.values[name] if name in child.bound else None for child in children]
            value = self._bind(name)
            self._submit(_Order(f"join of {name!r}", place, partial(self._interpreter.gather, parts, value), value))

    def concatenate(self, children: Sequence[Branch], place: Place) -> None:
        """Append what the children have written since the fork, one after the other."""
        for child in children:
            self._submit(_Order("join", place, partial(self._interpreter.adopt, child.snapshot(place), child.origin)))

    def snapshot(self, place: Place) -> Value:
        """The prompt when everything added so far is done."""
        value = Value(None)
        self._submit(_Order("text", place, partial(self._interpreter.snapshot, value), value))
        return value

    def mark(self, place: Place) -> Mark:
        """Where the text is now."""
        mark = Mark()
        self._submit(_Order("var_scope", place, partial(self._interpreter.mark, mark)))
        return mark

    def bind_since(self, name: str, mark: Mark, place: Place) -> None:
        """A variable of the text since then."""
        value = self._bind(name)
        self._submit(_Order(f"var_scope {name!r}", place, partial(self._interpreter.since, mark, value), value))

    def bind_now(self, name: str, content: Any) -> None:
        """A variable that is there already."""
        self._bind(name).finish(content)

    def _bind(self, name: str | None) -> Value:
        value = Value(name)
        if name is not None:
            self.values[name] = value
            self.bound.append(name)
            self.names.push(name)
        return value

    def _submit(self, order: _Order) -> None:
        with self._lock:
            failure, idle = self.failure, not self._busy
            if failure is None:
                self._orders.append(order)
                self._busy = True
        if failure is not None:
            _fail(order, failure)
        elif idle:
            self.run.launch(self)

    # On the event loop

    async def work(self) -> None:
        """Carry out orders until there are none, or one fails."""
        while (order := self._next()) is not None:
            try:
                async with asyncio.timeout_at(self.run.deadline.at) as limit:
                    await order.work()
            except asyncio.CancelledError:
                self.fail(self.run.why_cancelled(), order)
                raise
            except ProgramError as error:  # of another branch, or made for this one
                return self.fail(error, order)
            except Exception as error:  # of a backend, or of the program: it ends this branch, which keeps it
                if isinstance(error, TimeoutError) and limit.expired():
                    late = f"{order.what} was not done when the program's {self.run.deadline.seconds:g} s were over"
                    return self.fail(ProgramTimeout(late, order.place), order)
                return self.fail(ProgramError(f"{order.what}: {error}", order.place, error), order)
        return None

    def fail(self, error: ProgramError, order: _Order | None = None) -> None:
        """End the branch: this order and all that were to come fail. Only the first error counts."""
        with self._lock:
            self.failure = self.failure or error
            self._busy = False
            lost = [*([order] if order else ()), *self._orders]
            self._orders.clear()
        for each in lost:
            _fail(each, self.failure)
        self.feed.close(self.failure)

    def _next(self) -> _Order | None:
        with self._lock:
            if self._orders:
                return self._orders.popleft()
            self._busy = False
            return None


def _fail(order: _Order, error: ProgramError) -> None:
    if order.value is not None:
        order.value.fail(error)
