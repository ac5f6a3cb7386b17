"""The balancer's memory around the pure policies: what was sent where, what each worker has cached, how fast it is.

`Dispatcher` is used alike by the proxy and by the simulation: `pick` chooses (and changes nothing but the turn and the random state),
`dispatched` opens the account of one request, and its `Account` is told of the first token and of the end. Invariant: an account counts
from `dispatched` until `done`, exactly once, whatever happens in between. Time is an argument; nothing here does I/O.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from radixpd.mini_lb.admission import Decoding, Miss, Slo, broken
from radixpd.mini_lb.cost import EXPECTED_OUTPUT
from radixpd.mini_lb.feed import Change, Feed
from radixpd.mini_lb.ledger import RECENT_S, Entry, Line
from radixpd.mini_lb.pairing import Policies, route
from radixpd.mini_lb.prefix_index import CAP_BYTES, PIECE, Held, PrefixIndex, text_keys
from radixpd.mini_lb.snapshot import NO_HITS, Choice, Hits, RouteAsk, Situation, Tuning, WorkerSnapshot
from radixpd.mini_lb.speed import Fits

__all__ = ["Account", "Dispatcher"]

GRACE_S = 2.0  # after the end of a request: until then its pages are believed to be where they were sent, though no event says so yet
HOT_PREFIXES = 4096  # whose heat is remembered
MOMENT_S = 0.001
NOTHING: Held = (0, 0)
MEMORY = 0.02  # share of the newest answer in the mean output length


class Account:
    """One request under way. Every method may be called late or twice without harm."""

    def __init__(self, dispatcher: Dispatcher, choice: Choice, entries: Sequence[tuple[Line, Entry]]) -> None:
        self.choice = choice
        self._dispatcher = dispatcher
        self._entries = entries
        self._open = True

    def first_token(self, now: float, cached: int | None = None) -> None:
        """The first generated token came; `cached`: prompt tokens that the worker says it had, where it says so."""
        if self._open:
            for line, entry in self._entries:
                line.first_token(entry, now, cached)

    def prefilled(self, now: float) -> None:
        """The prefill half has ended: its server is free for others."""
        if self._open and len(self._entries) > 1:
            line, entry = self._entries[0]
            line.first_token(entry, now, None)
            line.close(entry, now, 0)

    def done(self, now: float, *, output_tokens: int = 0) -> None:
        """The answer has ended, well or not. `output_tokens`: how many it had, 0 where that is unknown."""
        if not self._open:
            return
        self._open = False
        for line, entry in self._entries:
            line.close(entry, now, output_tokens)
        self._dispatcher.ended(output_tokens)


@dataclass(slots=True)
class _Seen:
    """The ask at hand, so that `dispatched`, right after `pick`, need not look it up again.

    `keys`: page ids, or keys for pieces of the text, and how many tokens one stands for; `shared`: how many of them some worker has.
    """

    ask: RouteAsk
    keys: list[int]
    key_tokens: float
    shared: int = 0


class Dispatcher:
    """Chooses workers and keeps account. `known`: what workers say they have; `sent`: what was sent to them."""

    def __init__(
        self,
        policy: str = "kv_cost",
        *,
        prefill_policy: str | None = None,
        decode_policy: str | None = None,
        tuning: Tuning | None = None,
        cap_bytes: int = CAP_BYTES,
        seed: int = 0,
    ) -> None:
        self.policies = Policies(policy, prefill_policy or policy, decode_policy or policy)
        self.tuning = tuning or Tuning()
        self.known = PrefixIndex(cap_bytes)
        self.sent = PrefixIndex(cap_bytes)
        self._hits = self.policies.hits()
        self._lines: dict[str, Line] = {}
        self._common = Fits()
        self._heat: OrderedDict[int, tuple[float, float]] = OrderedDict()  # of the page that ends a shared prefix: (requests, when)
        self._last: _Seen | None = None
        self._output = float(EXPECTED_OUTPUT)
        self._random = random.Random(seed)
        self._turn = 0

    def pick(self, ask: RouteAsk, workers: Sequence[WorkerSnapshot], now: float) -> Choice:
        """The worker, or the pair where the workers are prefill and decode ones; raises `Overloaded` where none is usable."""
        seen = self._seen(ask)
        held = self._held(seen, workers, now) if seen.keys else {}
        seen.shared = max((sum(each) for each in held.values()), default=0)
        situation = Situation(self._turn, self._random, self._heat_of(seen, now), self.tuning)
        self._turn += 1
        views = [self._view(worker, seen, held.get(worker.name, NOTHING), now) for worker in workers if worker.usable]
        return route(replace(ask, output_tokens=self._expected(ask)), views, self.policies, situation)

    def dispatched(self, ask: RouteAsk, choice: Choice, now: float) -> Account:
        """`ask` is on its way to the chosen workers."""
        seen = self._seen(ask)
        self._warm(seen, now)
        cached = min(choice.chosen.hits.tokens, ask.tokens)
        last = choice.decode or choice.worker
        entries = []
        for name in dict.fromkeys((choice.worker, last)):
            line = self._line(name)
            output = self._expected(ask) if name == last else 0
            prompt = name == choice.worker
            seen_first = ask.stream or (prompt and choice.disaggregated)  # the end of a prefill half is always seen
            entry = Entry(now, ask.tokens - cached, cached, output, stream=seen_first, prompt=prompt, due=now + choice.chosen.ttft_s)
            line.open(entry)
            entries.append((line, entry))
            if seen.keys:
                self.known.touch(name, seen.keys, now)
                self.sent.store(name, seen.keys, now)
        return Account(self, choice, entries)

    def refusal(self, choice: Choice, slo: Slo, now: float, *, waited_s: float = 0.0, predict: bool = True) -> Miss | None:
        """Why a request should be refused at the door instead of being sent: which limit it would break. None to go ahead.

        `waited_s`: at the door, until now. `predict` off judges by the decode load of now, which swings; it is there to be compared with.
        """
        line = self._line(choice.decode or choice.worker)
        # A prompt that should have been through by now is late, not gone.
        starts = [
            max(entry.due, now) if entry.first is None else entry.first for entry in line.entries if predict or entry.first is not None
        ]
        decoding = Decoding(line.speed.decode, starts, self._output * line.step_s(), line.tokens)
        return broken(choice.chosen, decoding, slo, now, waited_s=waited_s, predict=predict)

    def reported(self, worker: WorkerSnapshot, now: float) -> None:
        """A fresh load report of a worker: what it holds beyond our own accounts is other people's load."""
        self._line(worker.name).reported(worker.running + worker.waiting, worker.waiting)

    def feed(self, name: str) -> Feed:
        """What takes in the KV events of a worker."""
        return Feed(name, self.known, gone=partial(self._gone, name))

    def forget(self, name: str, now: float) -> None:
        """The worker restarted with an empty cache, or left the fleet: what was known of its cache and its speed is void."""
        self.known.forget(name)
        self.sent.forget(name)
        self._lines.pop(name, None)  # requests that are still open have hold of it

    def _gone(self, name: str, change: Change, now: float) -> None:
        """A worker has dropped pages: they are not there because they were sent, but for those that open requests will bring back."""
        settled = self._line(name).oldest_sent(now)
        if change.cleared:
            self.sent.expire(name, settled)
        else:
            self.sent.remove(name, change.pages, tier=change.tier, before=settled)

    def ended(self, output: int) -> None:
        """An account was closed; `output`: tokens written, 0 for unknown."""
        if output:
            self._output += MEMORY * (output - self._output)

    def _expected(self, ask: RouteAsk) -> int:
        return ask.output_tokens or round(self._output)

    def _line(self, name: str) -> Line:
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = Line(self._common)
        return line

    def _seen(self, ask: RouteAsk) -> _Seen:
        if self._last is None or self._last.ask is not ask:
            keys = (list(ask.pages) or text_keys(ask.prompt, ask.namespace)) if self._hits != {"none"} else []
            self._last = _Seen(ask, keys, ask.page_size if ask.pages else ask.tokens / max(1, len(ask.prompt) // PIECE))
        return self._last

    def _exact(self, worker: WorkerSnapshot, ask: RouteAsk) -> bool:
        """Whether the worker itself says what it has of this prompt."""
        return worker.events and bool(ask.pages) and "sent" not in self._hits

    def _held(self, seen: _Seen, workers: Sequence[WorkerSnapshot], now: float) -> dict[str, Held]:
        """What each worker has of the prompt, in keys."""
        held = self.sent.match(seen.keys)
        exact = {worker.name for worker in workers if self._exact(worker, seen.ask)}
        dropped = 0
        for worker in workers:
            if worker.name not in held:
                continue
            if worker.name in exact:
                # Of a worker that tells, only what it cannot have told yet is believed without its word.
                dropped += self.sent.expire(worker.name, min(now - GRACE_S, self._line(worker.name).oldest_sent(now)))
            elif worker.kv_tokens:
                dropped += self.sent.trim(worker.name, int(worker.kv_tokens / seen.key_tokens))
        if dropped:
            held = self.sent.match(seen.keys)
        if exact:
            for name, known in self.known.match(seen.keys).items():
                held[name] = max(held.get(name, NOTHING), known, key=sum)
        return held

    def _view(self, worker: WorkerSnapshot, seen: _Seen, held: Held, now: float) -> WorkerSnapshot:
        """The worker with our own knowledge of it."""
        name, line, per_key = worker.name, self._line(worker.name), seen.key_tokens
        exact = self._exact(worker, seen.ask)
        index = self.known if exact else self.sent
        oldest = index.oldest(name)
        queued_tokens, queued_s = line.queued(now)
        room = round(worker.kv_tokens - index.held(name) * per_key - queued_tokens) if worker.kv_tokens else None
        hits = NO_HITS
        if held is not NOTHING:
            most = max(seen.ask.tokens - 1, 0)  # the last token is always computed
            device = min(round(held[0] * per_key), most)
            hits = Hits(device, min(round(held[1] * per_key), most - device), exact)
        return worker._replace(
            in_flight=line.in_flight,
            queued_tokens=queued_tokens,
            queued_s=queued_s,
            used_tokens=max(line.tokens, worker.kv_tokens - worker.free_tokens),
            recent_s=line.recent(now),
            room_tokens=room,
            idle_s=now - oldest if oldest is not None else 0.0,
            hits=hits,
            prefill=line.speed.prefill.model,
            decode=line.speed.decode,
        )

    def _heat_of(self, seen: _Seen, now: float) -> float:
        if not seen.shared:
            return 0.0
        count, at = self._heat.get(seen.keys[seen.shared - 1], (0.0, now))
        return count * math.exp((at - now) / RECENT_S)

    def _warm(self, seen: _Seen, now: float) -> None:
        """One request more that shares this prefix, up to the page that ends what is shared."""
        if not seen.shared:
            return
        page = seen.keys[seen.shared - 1]
        self._heat[page] = (self._heat_of(seen, now) + 1, now)
        self._heat.move_to_end(page)
        if len(self._heat) > HOT_PREFIXES:
            self._heat.popitem(last=False)
