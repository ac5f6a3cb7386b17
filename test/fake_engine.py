"""A fake engine for tests of the API process: speaks the scheduler's messages over the real links, without brain or model.

Its answer to a prompt is the prompt's own tokens once more, then the end of sequence; `ignore_eos` goes round again. So a test writes
in the prompt what it wants to be generated. One token per request and turn. Log-probabilities are made from position and id. A prompt that
goes on elsewhere (a room without a peer) ends as on a prefill server: computed, without a token.
`hold()` stops the turns, so that a test can look at requests that are open.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from radixpd.config.facts import MachineFacts, ModelFacts
from radixpd.config.resolve import Resolved, resolve
from radixpd.config.settings import (
    CacheSettings,
    DisaggregationSettings,
    GenerationSettings,
    ModelSettings,
    ObserveSettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
)
from radixpd.core.effects import Finished, Prefilled, PromptScored, TokensOut
from radixpd.core.journey import Journey
from radixpd.core.load import LoadSnapshot
from radixpd.core.request import Finish, SamplingParams
from radixpd.core.step import PromptScores, TokenLogprobs
from radixpd.core.tree_view import OWNERS, CacheView
from radixpd.core.whereabouts import Whereabouts
from radixpd.runtime.links import Addresses, Receiver, Sender
from radixpd.runtime.messages import Abort, Batch, Control, Failed, FromApi, Generate, Load, Reply, Shutdown, Stop

__all__ = ["EOS", "FakeEngine", "logprob_of", "make_resolved", "write_model"]

EOS = 256
HANDLER_HOPS = 8  # turns of the loop in which a handler writes what it was woken for
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_model(directory: Path, *, template: str | None = TEMPLATE) -> Path:
    """A tokenizer whose tokens are single bytes (ids follow the byte-level alphabet) and one `</s>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": "</s>"} | ({"chat_template": template} if template else {})
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return directory


def make_resolved(
    directory: Path,
    *,
    context_length: int = 512,
    max_total_tokens: int = 4096,
    scheduler: SchedulerSettings | None = None,
    server: ServerSettings | None = None,
    generation: GenerationSettings | None = None,
    observe: ObserveSettings | None = None,
    disaggregation: DisaggregationSettings | None = None,
    sampling: dict[str, Any] | None = None,
) -> Resolved:
    """Decisions for a server of the fake model; `sampling` is what its generation_config.json recommends."""
    model = ModelFacts(
        architecture="FakeForCausalLM", vocab_size=260, layers=1, heads=1, kv_heads=1, head_dim=2, hidden=2, intermediate=2,
        context_length=context_length, dtype="float32", tied=True, eos_ids=(EOS,), sampling=sampling or {},
    )  # fmt: skip
    settings = Settings(
        model=ModelSettings(model_path="org/fake"),
        cache=CacheSettings(max_total_tokens=max_total_tokens),
        scheduler=scheduler or SchedulerSettings(max_running_requests=64),
        server=server or ServerSettings(),
        generation=generation or GenerationSettings(),
        observe=observe or ObserveSettings(),
        disaggregation=disaggregation or DisaggregationSettings(),
    )
    machine = MachineFacts(available_memory=2**30, cores=1)
    return resolve(settings, directory=str(directory), tokenizer_directory=str(directory), model=model, machine=machine, seed=1)


def logprob_of(token: int) -> float:
    """The log-probability that the fake engine gives to a token."""
    return -(token + 1) / 128


@dataclass(slots=True)
class _Sample:
    rid: str
    sample: int
    request: Generate
    first: bool
    sent: int = 0

    def token(self) -> int:
        """The next token."""
        cycle = [*self.request.prompt.tolist()] + ([] if self.request.params.ignore_eos else [EOS])
        return int(cycle[self.sent % len(cycle)])


@dataclass(slots=True)
class _Turn:
    prefilled: list[Prefilled] = field(default_factory=list)
    scored: list[PromptScored] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


class FakeEngine:
    """See the module. `seen` keeps every message from the API process."""

    def __init__(self, directory: str, *, max_running: int = 64) -> None:
        addresses = Addresses(directory)
        self.seen: list[FromApi] = []
        self.stuck = ""  # why a change of role is refused
        self.orders: dict[str, dict[str, Any]] = {
            "configure_logging": {}, "freeze_gc": {"frozen": 1}, "start_profile": {}, "stop_profile": {"path": "/fake/trace.json"},
        }  # fmt: skip
        self.cached = 0
        self.loose: list[dict[str, Any]] = []  # of `state`: what is no request's
        self.cache = CacheView(
            page_size=16, pages=256, free_pages=256, tree_pages=0, locked_pages=0, request_pages=0, quarantine_pages=0,
            pages_per_cell=1, runs=[(OWNERS.index("free"), 256)], nodes=[], hidden_pages=0,
        )  # fmt: skip
        self.taken_in: Callable[[int], bool] = lambda steps: True  # whether the API has seen so many steps; tests in one loop know
        self._max_running = max_running
        self._context: zmq.Context[Any] = zmq.Context()
        self._sender = Sender(self._context, addresses.to_api)
        self._receiver: Receiver[FromApi] = Receiver(self._context, addresses.to_scheduler, FromApi, bind=True)
        self._samples: dict[str, _Sample] = {}
        self._held = False
        self._turning = False
        self._waiters: deque[tuple[type, int, asyncio.Future[None]]] = deque()
        self._totals = {"steps": 0, "finished": 0, "aborted": 0, "generated": 0, "prompt": 0}
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self._receiver.socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._receive)
        self._loop.call_soon(self._receive)

    def start(self) -> None:
        """Ready."""
        self._send_load()

    def hold(self) -> None:
        """No more turns."""
        self._held = True

    def release(self) -> None:
        """Turns go on."""
        self._held = False
        self._turn_soon()

    def step(self) -> None:
        """One turn by hand, while held."""
        self._turn()

    def fail(self, message: str) -> None:
        """Report a failure."""
        self._sender.send(Failed(message))

    async def received(self, kind: type, count: int = 1) -> None:
        """Wait until `count` messages of one kind have come."""
        if sum(isinstance(message, kind) for message in self.seen) < count:
            future: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append((kind, count, future))
            await asyncio.wait_for(future, 10)

    def of(self, kind: type) -> list[Any]:
        """Messages of one kind, in order."""
        return [message for message in self.seen if isinstance(message, kind)]

    def close(self) -> None:
        """Close the sockets."""
        self._loop.remove_reader(self._descriptor)
        self._receiver.close()
        self._sender.close()
        self._context.term()

    def _receive(self) -> None:
        if self._receiver.socket.closed:
            return
        for message in self._receiver.drain():
            self.seen.append(message)
            match message:
                case Generate():
                    self._begin(message)
                case Abort(rid, text, status):
                    self._end_now(rid, Finish("abort", message=text, status=status))
                case Stop(rid, keep, matched):
                    self._end_now(rid, Finish("stop", matched=matched), keep=keep)
                case Control(number, action, args):
                    self._answer(number, action, args)
                case Shutdown():
                    pass
        for waiter in list(self._waiters):
            kind, count, future = waiter
            if sum(isinstance(message, kind) for message in self.seen) >= count and not future.done():
                future.set_result(None)
                self._waiters.remove(waiter)

    def _begin(self, message: Generate) -> None:
        self._totals["prompt"] += len(message.prompt)
        for index, rid in enumerate(message.rids):
            self._samples[rid] = _Sample(rid, index, message, first=index == 0)
        self._send_load()
        self._turn_soon()

    def _answer(self, number: int, action: str, args: dict[str, Any]) -> None:
        if action == "state":
            rids = [rid for rid in args.get("rids", self._samples) if rid in self._samples]
            self._sender.send(Reply(number, {"in_flight": 0, "requests": [*map(self._place, rids), *([] if args else self.loose)]}))
        elif action == "cache_tree":
            self._sender.send(Reply(number, msgspec.to_builtins(self.cache, builtin_types=(bytes,))))
        elif action == "flush_cache":
            self._sender.send(Reply(number, {}, "requests are running" if self._samples else ""))
        elif action in ("pause_abort", "pause_retract", "pause_in_place", "continue"):
            (self.release if action == "continue" else self.hold)()
            self._sender.send(Reply(number, {}))
        elif action == "switch_role":
            self._sender.send(Reply(number, {}, self.stuck))
        elif action in self.orders:
            self._sender.send(Reply(number, self.orders[action]))

    def _turn_soon(self) -> None:
        if not self._turning and not self._held:
            self._turning = True
            self._turn_after(HANDLER_HOPS)

    def _turn_after(self, hops: int) -> None:
        """The next turn comes when the API has taken the last one in and its handlers have had their turns of the loop."""
        if self._held:
            self._turning = False
        elif not self.taken_in(self._totals["steps"]):
            self._loop.call_soon(self._turn_after, HANDLER_HOPS)
        elif hops:
            self._loop.call_soon(self._turn_after, hops - 1)
        else:
            self._turn()

    def _turn(self) -> None:
        self._turning = False
        if self._receiver.socket.closed:
            return
        turn = _Turn()
        for sample in list(self._samples.values())[: self._max_running]:
            self._advance(sample, turn)
        if turn.tokens or turn.finished:
            ids = np.asarray(list(turn.tokens.values()), dtype=np.int32)
            step = TokensOut(tuple(turn.tokens), ids, tuple(turn.logprobs) if any(turn.logprobs) else ())
            self._send_load()  # first: whoever has the answer may look at once
            self._sender.send(Batch(tuple(turn.prefilled), tuple(turn.scored), (step,), tuple(turn.finished)))
            self._totals["steps"] += 1
            self._send_load()  # and again: who has seen this step counted has its answers, since messages keep their order
        if self._samples:
            self._turn_soon()

    def _advance(self, sample: _Sample, turn: _Turn) -> None:
        params, prompt = sample.request.params, sample.request.prompt
        if sample.sent == 0:
            turn.prefilled.append(Prefilled(sample.rid, self.cached, 0.0, self._journey(sample)))
            if sample.first and params.logprobs is not None and params.logprobs.start >= 0:
                turn.scored.append(PromptScored(sample.rid, _scores(prompt, params)))
        room = sample.request.room
        if params.max_new_tokens == 0 or (room is not None and not room.peer):
            turn.finished.append(self._finished(sample, Finish("length")))
            return
        token = sample.token()
        turn.tokens[sample.rid] = token
        turn.logprobs.append(_logprobs(token, params))
        sample.sent += 1
        self._totals["generated"] += 1
        if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
            turn.finished.append(self._finished(sample, Finish("stop", matched=token)))
        elif sample.sent == params.max_new_tokens:
            turn.finished.append(self._finished(sample, Finish("length")))

    def _finished(self, sample: _Sample, finish: Finish, *, keep: int | None = None) -> Finished:
        del self._samples[sample.rid]
        self._totals["finished"] += 1
        self._totals["aborted"] += finish.kind == "abort"
        completion = sample.sent if keep is None else keep
        return Finished(sample.rid, finish, len(sample.request.prompt), completion, self.cached, 0, self._journey(sample))

    def _place(self, rid: str) -> dict[str, Any]:
        prompt = len(self._samples[rid].request.prompt)
        place = Whereabouts(rid=rid, part="decode", since=0.5, waits_for="runner", phase="running", age=1.0, slot=0, prompt_tokens=prompt)
        return asdict(place)

    def _journey(self, sample: _Sample) -> Journey:
        prompt = len(sample.request.prompt)
        hit = min(self.cached, prompt)
        return Journey(prompt_tokens=prompt, decode_hit_tokens=hit, local_computed_tokens=prompt - hit, queue_ms=0.5)

    def _end_now(self, rid: str, finish: Finish, *, keep: int | None = None) -> None:
        if (sample := self._samples.get(rid)) is not None:
            batch = Batch(finished=(self._finished(sample, finish, keep=keep),))
            self._send_load()  # as above
            self._sender.send(batch)

    def _send_load(self) -> None:
        running = min(len(self._samples), self._max_running)
        self._sender.send(
            Load(
                LoadSnapshot(
                    running=running,
                    waiting=len(self._samples) - running,
                    pages=256,
                    free_pages=256 - running,
                    request_pages=running,
                    max_running=self._max_running,
                    steps_total=self._totals["steps"],
                    prompt_tokens_total=self._totals["prompt"],
                    generated_tokens_total=self._totals["generated"],
                    finished_total=self._totals["finished"],
                    aborted_total=self._totals["aborted"],
                )
            )
        )


def _logprobs(token: int, params: SamplingParams) -> TokenLogprobs | None:
    wish = params.logprobs
    if wish is None:
        return None
    top = np.arange(wish.top, dtype=np.int32)
    asked = np.asarray([logprob_of(id) for id in wish.token_ids], dtype=np.float32)
    return TokenLogprobs(logprob_of(token), top, np.asarray([logprob_of(int(id)) for id in top], dtype=np.float32), asked)


def _scores(prompt: np.ndarray, params: SamplingParams) -> PromptScores:
    wish = params.logprobs
    assert wish is not None
    first = max(1, wish.start)
    rows = [found for token in prompt[first:].tolist() if (found := _logprobs(token, params))]
    return PromptScores(
        first=first,
        logprobs=np.asarray([row.logprob for row in rows], dtype=np.float32),
        top_ids=np.asarray([row.top_ids for row in rows], dtype=np.int32).reshape(len(rows), wish.top),
        top_logprobs=np.asarray([row.top_logprobs for row in rows], dtype=np.float32).reshape(len(rows), wish.top),
        asked=np.asarray([row.asked for row in rows], dtype=np.float32).reshape(len(rows), len(wish.token_ids)),
    )
