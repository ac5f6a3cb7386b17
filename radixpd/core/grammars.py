"""Which grammars are ready, and the requests that wait for theirs. The model runner compiles; the brain counts who uses what.

A grammar is wanted from the arrival of the first request that has it to the end of the last one; while it is not ready, its requests
are PARKED and hold nothing. Invariant: no request starts before its grammar is ready, and none is ready that nobody uses. Held by the
scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from radixpd.core.request import Grammar, Request

__all__ = ["ForgetGrammar", "GrammarOrder", "Grammars", "WantGrammar"]


@dataclass(frozen=True, slots=True)
class WantGrammar:
    """To the runner: make it ready, and answer with this number."""

    id: int
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class ForgetGrammar:
    """To the runner: nobody uses it any more."""

    grammar: Grammar


GrammarOrder = WantGrammar | ForgetGrammar


@dataclass(slots=True)
class _Use:
    """A grammar that live requests have. `id`: of the question that makes it ready."""

    id: int
    users: int = 0
    ready: bool = False
    waiting: list[Request] = field(default_factory=list)


class Grammars:
    """Of all live requests."""

    def __init__(self) -> None:
        self.orders: list[GrammarOrder] = []
        self._uses: dict[Grammar, _Use] = {}
        self._wanted: dict[int, Grammar] = {}
        self._ids = 0

    @property
    def queued(self) -> int:
        """Samples whose grammar is not ready."""
        return sum(len(request.samples) for use in self._uses.values() for request in use.waiting)

    def enter(self, request: Request) -> bool:
        """A request with a grammar is here, with all its samples; whether it must wait."""
        grammar = request.params.grammar
        if grammar is None:
            return False
        use = self._uses.get(grammar)
        if use is None:
            self._ids += 1
            use = self._uses[grammar] = _Use(self._ids)
            self._wanted[use.id] = grammar
            self.orders.append(WantGrammar(use.id, grammar))
        use.users += len(request.samples)
        if not use.ready:
            use.waiting.append(request)
        return not use.ready

    def waits(self, request: Request) -> bool:
        """Whether the request waits for its grammar."""
        use = self._uses.get(request.params.grammar) if request.params.grammar is not None else None
        return use is not None and request in use.waiting

    def leave(self, request: Request) -> None:
        """One sample has ended."""
        grammar = request.params.grammar
        if grammar is None or (use := self._uses.get(grammar)) is None:
            return
        if request in use.waiting:
            use.waiting.remove(request)
        use.users -= 1
        if not use.users:
            del self._uses[grammar]
            self._wanted.pop(use.id, None)
            self.orders.append(ForgetGrammar(grammar))

    def answered(self, id: int, *, ready: bool) -> list[Request]:
        """The runner's answer; the requests that have waited for it. Nobody may be left."""
        grammar = self._wanted.pop(id, None)
        if grammar is None:
            return []
        use = self._uses[grammar]
        use.ready = ready
        released, use.waiting = use.waiting, []
        return released
