"""From an admitted request to running samples: tokenize, check that it fits, register outputs, send `Generate`.

Invariant: nothing is sent before every prompt of one HTTP request has passed every check, and a request that is refused leaves no trace.
The manager also knows whether this server takes requests now (`state`), and turns an abort by rid into one `Abort` per sample. Called by
the routes and by the offline interface.
"""

from __future__ import annotations

import enum
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from radixpd.errors import BadRequest, EngineFailed, Overloaded, RadixpdError
from radixpd.runtime.admission import Ask, Limits
from radixpd.runtime.caller import caller
from radixpd.runtime.client import Client
from radixpd.runtime.defaults import Defaults
from radixpd.runtime.fitting import cut, may_cut, output_limit
from radixpd.runtime.messages import Generate
from radixpd.runtime.off_loop import Pace, in_thread
from radixpd.runtime.output import Generation, Observer, Output
from radixpd.runtime.request_log import RequestLog
from radixpd.runtime.rooms import rooms_named
from radixpd.text.chat import ChatTemplate
from radixpd.text.detokenizer import Detokenizer
from radixpd.text.tokenizer import Tokenizer

__all__ = ["TEXT_SECONDS", "Prepared", "State", "TokenizerManager"]

THREAD_ABOVE = 8192  # characters; shorter prompts are tokenized on the loop
TEXT_SECONDS = 20.0  # for tokenizing or rendering one prompt
MAX_SAMPLES = 4096  # of one request: prompts times n
CONTEXT_IDS = 16  # prompt ids that the detokenizer sees for the left context
DRAIN_RETRY = 5  # seconds


class State(enum.Enum):
    """Whether requests are taken."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Prepared:
    """One prompt, ready to be sent. `cut`: tokens that it has lost at its beginning."""

    ask: Ask
    message: Generate
    group: str
    cut: int


@dataclass(slots=True, eq=False)
class TokenizerManager:
    """See the module. `max_queued`: waiting requests above which new ones are refused."""

    client: Client
    tokenizer: Tokenizer
    template: ChatTemplate | None
    limits: Limits
    observer: Observer
    seed: int
    defaults: Defaults = field(default_factory=Defaults)
    max_queued: int | None = None
    request_log: RequestLog = field(default_factory=RequestLog)
    on_end: tuple[Callable[[Output], None], ...] = ()  # told about each output that has ended, except those without logs
    draining: bool = False
    warm: bool = False
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @property
    def state(self) -> State:
        """Derived from what happened, never set."""
        if self.client.failed.is_set():
            return State.FAILED
        if self.draining:
            return State.DRAINING
        return State.READY if self.warm and self.client.ready.is_set() else State.STARTING

    def check_open(self) -> None:
        """Raise unless requests are taken now."""
        state = self.state
        if state is State.FAILED:
            raise EngineFailed(self.client.failure)
        if state is not State.READY:
            raise Overloaded(f"the server is {state.value}", retry_after=DRAIN_RETRY)

    async def submit(self, asks: Sequence[Ask], *, internal: bool = False) -> Generation:
        """Prepare and start the prompts of one request. `internal` passes before the server is open (warm-up)."""
        if not internal:
            self.check_open()
        samples = sum(ask.params.n for ask in asks)
        if samples > MAX_SAMPLES:
            raise BadRequest(f"a request may ask for at most {MAX_SAMPLES} outputs (prompts times n), got {samples}", param="n")
        arrived = time.monotonic()
        prepared: list[Prepared] = []
        pace = Pace()
        for ask in asks:
            prepared.append(await self.prepare(ask, arrived))
            await pace.breathe()
        return self.start(prepared, internal=internal)

    def start(self, prepared: Sequence[Prepared], *, internal: bool = False) -> Generation:
        """Send prompts that are ready. No await here: checks and registration are one step."""
        if not internal:
            self.check_open()
            self._check_queue(sum(len(item.message.rids) for item in prepared))
        self._check_rids(prepared)
        _check_rooms(prepared)
        generation = Generation(self.client.abort)
        generation.hold(self._outputs(item, generation) for item in prepared)
        for item, outputs in zip(prepared, generation.groups):
            self.client.submit(item.message, outputs)
            if not item.ask.no_logs:
                self.request_log.received(outputs, item.ask.prompt)
        return generation

    def turned_away(self, fields: Sequence[Any], count: int, error: RadixpdError) -> None:
        """A body of `count` prompts is refused. `fields`: its `bootstrap_host`, `_port` and `_room`, unread as they came."""
        for room in rooms_named(fields, count, self.limits.rooms):
            self.client.refuse(room, error)

    async def encode(self, text: str, *, special: bool = True) -> np.ndarray:
        """Ids of a text; a long one does not hold up the loop, and one that can never fit is not tokenized at all."""
        most = self.limits.longest * self.tokenizer.longest_token
        if len(text) > most:
            raise BadRequest(
                f"the text has {len(text)} characters, more than any {self.limits.longest} tokens of this model hold ({most})",
                param="text",
                code="context_length_exceeded",
            )
        if len(text) <= THREAD_ABOVE:
            return self.tokenizer.encode(text, special=special)
        try:
            return await in_thread(lambda: self.tokenizer.encode(text, special=special), seconds=TEXT_SECONDS)
        except TimeoutError:
            raise Overloaded(f"tokenizing took longer than {TEXT_SECONDS:g} s") from None

    async def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Each token's share of the text, special tokens spelt out; joined they are the text. A character that several tokens make up
        stands at the last of them."""

        def spell() -> list[str]:
            stream = self.tokenizer.stream(skip_special=False)
            strings = [stream.push(id) for id in ids]
            return [*strings[:-1], strings[-1] + stream.flush()] if strings else []

        if len(ids) <= THREAD_ABOVE // 8:
            return spell()
        try:
            return await in_thread(spell, seconds=TEXT_SECONDS)
        except TimeoutError:
            raise Overloaded(f"detokenizing took longer than {TEXT_SECONDS:g} s") from None

    async def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """The prompt of a conversation; `options` are those of `ChatTemplate.render`. A template is a program: it runs off the loop."""
        if self.template is None:
            raise BadRequest("this model has no chat template: give one with --chat-template, or use /v1/completions", param="messages")
        render = partial(self.template.render, messages, **options)
        try:
            return await in_thread(render, seconds=TEXT_SECONDS)
        except TimeoutError:
            raise BadRequest(f"the chat template ran for more than {TEXT_SECONDS:g} s", param="messages") from None

    def abort(self, rid: str) -> int:
        """Abort one sample or all samples of a request of the caller's; how many were still open."""
        client = self.client
        names = caller().names(rid)
        found = {each for name in names for each in (*client.groups.get(name, ()), *([name] if name in client.outputs else ()))}
        for name in sorted(found):
            client.abort(name)
        return len(found)

    def abort_all(self, *, message: str = "aborted by the client", status: int = 499) -> int:
        """Abort everything of the caller's; how many were open."""
        who = caller()
        found = [name for name in self.client.outputs if who.may_see(name)]
        for name in found:
            self.client.abort(name, message, status)
        return len(found)

    async def prepare(self, ask: Ask, arrived: float) -> Prepared:
        """Tokenize one prompt and check that it fits; nothing is sent."""
        whole = await self._ids(ask)
        if not len(whole):
            shown = _shown(ask.names, "text")
            raise BadRequest(f"{shown} is empty: it has no tokens", param=shown)
        prompt = cut(whole, ask, self.limits, bos=self.tokenizer.bos_id)
        limit = output_limit(ask, len(prompt), self.limits)
        logprobs = ask.params.logprobs
        if logprobs is not None and logprobs.start > len(prompt):
            raise BadRequest(
                f"logprob_start_len must be between -1 and {len(prompt)}, the prompt's length, got {logprobs.start}",
                param=_shown(ask.names, "logprob_start_len"),
            )
        seed = ask.params.seed if ask.seeded else self._random.getrandbits(62)
        who = caller()
        name = ask.rid or uuid.uuid4().hex
        who.rid = who.rid or name
        group = who.scope + name
        samples = ask.params.n
        return Prepared(
            ask=ask,
            message=Generate(
                rids=(group,) if samples == 1 else tuple(f"{group}-{index}" for index in range(samples)),
                prompt=prompt,
                params=replace(ask.params, max_new_tokens=limit, seed=seed),
                namespace=who.salted(ask.namespace),
                priority=ask.priority,
                arrived=arrived,
                room=ask.room,
            ),
            group=group,
            cut=len(whole) - len(prompt),
        )

    async def _ids(self, ask: Ask) -> np.ndarray:
        """The prompt's ids, before any cut."""
        text = ask.prompt
        if not isinstance(text, str):
            return text
        most = self.limits.longest * self.tokenizer.longest_token
        if may_cut(ask, self.limits) and len(text) > most:
            # Its end alone makes more tokens than can be kept.
            bos = "" if self.tokenizer.bos_id is None else self.tokenizer.token_text(self.tokenizer.bos_id)
            text = (bos if text.startswith(bos) else "") + text[len(bos) - most :]
        try:
            return await self.encode(text, special=ask.special)
        except BadRequest as error:
            error.param = _shown(ask.names, error.param or "text")
            raise

    def _check_queue(self, samples: int) -> None:
        if self.max_queued is None:
            return
        client = self.client
        unstarted = len(client.unstarted)
        # Slots that are free take requests at once. Whether pages suffice only the brain knows: it refuses what it cannot seat.
        free = max(0, self.limits.max_running - (len(client.outputs) - unstarted))
        if unstarted + samples - free > self.max_queued:
            raise Overloaded(f"the queue is full: --max-queued-requests is {self.max_queued}")

    def _check_rids(self, prepared: Sequence[Prepared]) -> None:
        live, groups, shown = self.client.outputs, self.client.groups, caller().shown
        seen: set[str] = set()
        for item in prepared:
            for rid in {item.group, *item.message.rids}:
                if rid in seen:
                    raise BadRequest(f"rid {shown(rid)} stands for two outputs of this request", param="rid", code="duplicate_rid")
                if rid in live or rid in groups:
                    raise BadRequest(f"rid {shown(rid)} is in use by a live request", param="rid", code="duplicate_rid")
                seen.add(rid)

    def _outputs(self, item: Prepared, generation: Generation) -> tuple[Output, ...]:
        ask, prompt = item.ask, item.message.prompt
        return tuple(
            Output(
                rid=rid,
                group=item.group,
                sample=index,
                prompt=prompt,
                cut=item.cut,
                detokenizer=Detokenizer(
                    self.tokenizer,
                    context=prompt[-CONTEXT_IDS:],
                    rules=ask.rules,
                    skip_special=ask.skip_special,
                    keep_stop=ask.keep_stop,
                    least=ask.params.min_new_tokens,
                ),
                wake=generation.wake,
                observer=self.observer if ask.log_metrics else None,
                on_end=() if ask.no_logs else (self.request_log.ended, *self.on_end),
                params=item.message.params,
                priority=ask.priority,
                salted=bool(ask.namespace),
                keep_stop=ask.keep_stop,
                kept=not ask.no_logs,
                arrived=item.message.arrived,
            )
            for index, rid in enumerate(item.message.rids)
        )


def _check_rooms(prepared: Sequence[Prepared]) -> None:
    """A room is for one prompt; its samples share it."""
    seen: set[int] = set()
    for item in prepared:
        if (room := item.message.room) is None:
            continue
        if room.number in seen:
            raise BadRequest(f"bootstrap_room {room.number} stands for two prompts of this request", param="bootstrap_room")
        seen.add(room.number)


def _shown(names: Mapping[str, str], name: str) -> str:
    return names.get(name, name)
