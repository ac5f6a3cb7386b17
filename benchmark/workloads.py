"""Datasets: from options and a tokenizer to plain requests (prompt, output length, arrival, session). Nothing here talks to a server.

Invariant: the same options, tokenizer and salt give the same requests. `salt` changes what prompts say and leaves their lengths and
arrivals alone: a second run of the same shape then finds nothing of the first in a cache. Called by the serving and offline benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from benchmark.flags import flag
from benchmark.prompts import Pieces, Tokenizer, find_pieces, rng_for
from benchmark.traces import TraceRow, read_azure, read_custom, read_mooncake, read_sharegpt
from radixpd.errors import ConfigError

__all__ = ["BLOCK", "DATASETS", "DatasetOptions", "Request", "Workload", "build", "poisson_arrivals"]

BLOCK = 512  # tokens that one hash id of a Mooncake trace stands for
LEAST_SHAREGPT = 4  # tokens of a ShareGPT prompt or answer below which it is skipped
NAMES = ("random", "random-ids", "generated-shared-prefix", "multi-turn", "mooncake", "azure", "sharegpt", "custom")


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """Dataset."""

    dataset_name: str = flag("random", "where prompts come from", choices=NAMES)
    dataset_path: str | None = flag(None, "file of the datasets mooncake, azure, sharegpt and custom", metavar="FILE")
    num_prompts: int = flag(1000, "requests (file datasets: at most); not for generated-shared-prefix and multi-turn", low=1, high=10**7)
    seed: int = flag(1, "same seed, same requests and arrivals", low=0, high=2**31 - 1)
    tokenize_prompt: bool = flag(False, "send token ids instead of text")
    apply_chat_template: bool = flag(False, "send each prompt as one user message, rendered here (as token ids)")
    random_input_len: int = flag(1024, "random: tokens of a prompt at most", low=1, high=2**24)
    random_output_len: int = flag(128, "random: tokens of an output at most", low=1, high=2**24)
    random_range_ratio: float = flag(0.0, "random: lengths are uniform between this share of the most and the most", low=0.0, high=1.0)
    gsp_num_groups: int = flag(64, "shared prefix: system prompts", low=1, high=10**6)
    gsp_prompts_per_group: int = flag(16, "shared prefix: questions to each system prompt", low=1, high=10**6)
    gsp_system_prompt_len: int = flag(2048, "shared prefix: tokens of a system prompt", low=1, high=2**24)
    gsp_question_len: int = flag(128, "shared prefix: tokens of a question", low=1, high=2**24)
    gsp_output_len: int = flag(256, "shared prefix: tokens of an output", low=1, high=2**24)
    num_clients: int = flag(256, "multi-turn: conversations", low=1, high=10**6)
    num_rounds: int = flag(5, "multi-turn: questions of each conversation", low=1, high=10**4)
    request_length: int = flag(512, "multi-turn: tokens of a question", low=1, high=2**24)
    output_length: int = flag(64, "multi-turn: tokens of an answer", low=1, high=2**24)
    sharegpt_output_len: int | None = flag(None, "sharegpt, custom: tokens of every output instead of the file's", low=1, high=2**24)
    use_trace_timestamps: bool = flag(False, "send when the trace says, not at --request-rate")
    mooncake_slowdown_factor: float = flag(1.0, "stretch a trace's time (any trace) by this factor", low=1e-6, high=1e6)


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Of a conversation (`session`) the prompt is the new question alone: what was said before goes in front of it."""

    prompt: str | list[int]
    output_len: int
    input_len: int  # planned tokens of `prompt`
    arrival: float | None = None  # seconds after the start; None: at the rate that the program is given
    session: int | None = None
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of sending, and what the reader of figures must know about them."""

    requests: tuple[Request, ...]
    notes: tuple[str, ...] = ()


class Supply:
    """What a dataset draws from. `limit`: tokens of prompt plus output that the server can take."""

    def __init__(self, options: DatasetOptions, tokenizer: Tokenizer, limit: int | None, salt: int) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.limit = limit
        self._salt = salt

    @cached_property
    def pieces(self) -> Pieces:
        return find_pieces(self.tokenizer)

    def rng(self, *key: int | str) -> np.random.Generator:
        """For what prompts say."""
        return rng_for(self.options.seed, self._salt, *key)

    @property
    def path(self) -> str:
        if self.options.dataset_path is None:
            raise ConfigError(f"--dataset-name {self.options.dataset_name} needs --dataset-path")
        return self.options.dataset_path

    def check(self, tokens: int, what: str) -> None:
        """Refuse lengths, asked for by flags, that never fit."""
        if self.limit is not None and tokens > self.limit:
            raise ConfigError(f"{what} make {tokens} tokens; the server takes {self.limit}")


def poisson_arrivals(count: int, rate: float, rng: np.random.Generator) -> list[float]:
    """Seconds after the start: the first at once, then exponential gaps of mean 1 / rate; all at once at an infinite rate."""
    gaps = np.concatenate([[0.0], rng.exponential(1.0 / rate, count - 1)]) if np.isfinite(rate) else np.zeros(count)
    arrivals: list[float] = np.cumsum(gaps).tolist()
    return arrivals


def build(options: DatasetOptions, tokenizer: Tokenizer, *, limit: int | None = None, salt: int = 0) -> Workload:
    """The workload that the options ask for."""
    supply = Supply(options, tokenizer, limit, salt)
    workload = DATASETS[options.dataset_name](supply)
    requests = list(workload.requests)
    if not options.use_trace_timestamps:
        requests = [replace(request, arrival=None) for request in requests]
    elif any(request.arrival is None for request in requests):
        raise ConfigError(f"--use-trace-timestamps: --dataset-name {options.dataset_name} has no timestamps here")
    return replace(workload, requests=tuple(_in_ids(supply, requests)))


def _in_ids(supply: Supply, requests: list[Request]) -> list[Request]:
    """The requests, with ids for texts where the options want ids."""
    options, tokenizer = supply.options, supply.tokenizer
    if options.apply_chat_template:
        if any(not isinstance(request.prompt, str) or request.session is not None for request in requests):
            raise ConfigError(f"--apply-chat-template needs single prompts of text; --dataset-name {options.dataset_name} has none")
        chats = [tokenizer.chat([{"role": "user", "content": str(request.prompt)}]) for request in requests]
        return [replace(request, prompt=ids, input_len=len(ids)) for request, ids in zip(requests, chats)]
    if not options.tokenize_prompt:
        return requests
    texts = [request for request in requests if isinstance(request.prompt, str)]
    encoded = iter(tokenizer.encode([str(request.prompt) for request in texts]))
    whole = [replace(request, prompt=next(encoded)) if isinstance(request.prompt, str) else request for request in requests]
    return [replace(request, input_len=len(request.prompt)) for request in whole]


def _random_lengths(options: DatasetOptions) -> list[tuple[int, int]]:
    rng = rng_for("lengths", options.seed)

    def draw(most: int) -> list[int]:
        lengths: list[int] = rng.integers(max(int(most * options.random_range_ratio), 1), most + 1, options.num_prompts).tolist()
        return lengths

    return list(zip(draw(options.random_input_len), draw(options.random_output_len)))


def _random(supply: Supply) -> Workload:
    """Random words, a length of its own for each prompt."""
    options = supply.options
    supply.check(options.random_input_len + options.random_output_len, "--random-input-len and --random-output-len")
    requests = [
        Request(supply.pieces.prompt(supply.rng("random", index), tokens), output, max(tokens, supply.pieces.overhead + 1))
        for index, (tokens, output) in enumerate(_random_lengths(options))
    ]
    return Workload(tuple(requests))


def _random_ids(supply: Supply) -> Workload:
    """Random token ids, special ones left out where the tokenizer names them."""
    options = supply.options
    supply.check(options.random_input_len + options.random_output_len, "--random-input-len and --random-output-len")
    allowed = np.setdiff1d(np.arange(supply.tokenizer.vocab_size), sorted(supply.tokenizer.special_ids))
    requests = [
        Request(supply.rng("ids", index).choice(allowed, tokens).tolist(), output, tokens)
        for index, (tokens, output) in enumerate(_random_lengths(options))
    ]
    return Workload(tuple(requests))


def _shared_prefix(supply: Supply) -> Workload:
    """Groups of prompts with a system prompt in common, in random order."""
    options, pieces = supply.options, supply.pieces
    lengths = (options.gsp_system_prompt_len, options.gsp_question_len, options.gsp_output_len)
    supply.check(sum(lengths), "--gsp-system-prompt-len, --gsp-question-len and --gsp-output-len")
    requests = []
    for group in range(options.gsp_num_groups):
        system = pieces.prompt(supply.rng("system", group), lengths[0])
        for index in range(options.gsp_prompts_per_group):
            question = pieces.text(pieces.draw(supply.rng("question", group, index), lengths[1]))
            requests.append(Request(system + question, lengths[2], lengths[0] + lengths[1]))
    order = rng_for("order", options.seed).permutation(len(requests)).tolist()
    return Workload(tuple(requests[index] for index in order))


def _multi_turn(supply: Supply) -> Workload:
    """Conversations: every question of every client, round by round. The real answers go in between when they are known."""
    options, pieces = supply.options, supply.pieces
    supply.check(
        options.num_rounds * (options.request_length + options.output_length), "--num-rounds of --request-length and --output-length"
    )

    def question(client: int, turn: int) -> Request:
        # Only the first question meets what the tokenizer adds in front of a text.
        own = options.request_length - (pieces.overhead if turn == 0 else 0)
        text = pieces.text(pieces.draw(supply.rng("turn", client, turn), max(own, 1)))
        return Request(text, options.output_length, options.request_length, session=client, turn=turn)

    return Workload(tuple(question(client, turn) for turn in range(options.num_rounds) for client in range(options.num_clients)))


def _trace(supply: Supply, rows: list[TraceRow]) -> Workload:
    """Prompts of a trace's lengths; equal hash ids become equal blocks. What the server cannot take is cut, and counted."""
    pieces, blocks = supply.pieces, dict[int, list[int]]()
    requests, cut = [], 0
    for index, row in enumerate(rows):
        tokens, output = _fit(row, supply.limit)
        cut += (tokens, output) != (row.input_len, row.output_len)
        indices: list[int] = []
        for hash_id in row.hash_ids[: -(-tokens // BLOCK)]:
            if hash_id not in blocks:
                blocks[hash_id] = pieces.draw(supply.rng("block", hash_id), BLOCK)
            indices += blocks[hash_id]
        own = max(tokens - pieces.overhead, 1)
        indices += pieces.draw(supply.rng("tail", index), own - len(indices))
        arrival = row.time * supply.options.mooncake_slowdown_factor
        requests.append(Request(pieces.text(indices[:own]), output, own + pieces.overhead, arrival))
    notes = (f"{cut} of {len(rows)} requests did not fit into {supply.limit} tokens and were cut",) if cut else ()
    return Workload(tuple(requests), notes)


def _fit(row: TraceRow, limit: int | None) -> tuple[int, int]:
    """Lengths of a row within the limit: the output gets at most half of it, the prompt keeps its beginning."""
    if limit is None:
        return row.input_len, row.output_len
    output = min(row.output_len, max(limit // 2, 1))
    return min(row.input_len, limit - output), output


def _sharegpt(supply: Supply) -> Workload:
    """First question and answer of conversations, in random order; the answer's length is the output's."""
    options = supply.options
    pairs = read_sharegpt(supply.path)
    order = rng_for("order", options.seed).permutation(len(pairs)).tolist()
    requests, skipped, batch = list[Request](), 0, 256
    for start in range(0, len(order), batch):
        chosen = [pairs[index] for index in order[start : start + batch]]
        prompts = supply.tokenizer.encode([prompt for prompt, _ in chosen])
        answers = supply.tokenizer.encode([answer for _, answer in chosen])
        for (prompt, _), ids, answer in zip(chosen, prompts, answers):
            output = options.sharegpt_output_len or len(answer)
            fits = supply.limit is None or len(ids) + output <= supply.limit
            if not fits or min(len(ids), output) < LEAST_SHAREGPT:
                skipped += 1
            elif len(requests) < options.num_prompts:
                requests.append(Request(prompt, output, len(ids)))
        if len(requests) == options.num_prompts:
            break
    if not requests:
        raise ConfigError(f"--dataset-path {supply.path}: every conversation is too short or too long")
    return Workload(tuple(requests), (f"{skipped} conversations were too short or too long and were skipped",) if skipped else ())


def _custom(supply: Supply) -> Workload:
    """Prompts of a JSONL file, in its order."""
    options = supply.options
    rows = read_custom(supply.path, options.num_prompts)
    texts = [row.prompt for row in rows if isinstance(row.prompt, str)]
    lengths = iter([len(ids) for ids in supply.tokenizer.encode(texts)])
    answers = iter([len(ids) for ids in supply.tokenizer.encode([row.answer for row in rows if row.answer is not None])])
    requests, skipped = list[Request](), 0
    for row in rows:
        tokens = next(lengths) if isinstance(row.prompt, str) else len(row.prompt)
        told = next(answers) if row.answer is not None else None
        output = options.sharegpt_output_len or row.output_len or told or options.random_output_len
        if supply.limit is not None and tokens + output > supply.limit:
            skipped += 1
            continue
        arrival = None if row.time is None else row.time * options.mooncake_slowdown_factor
        requests.append(Request(row.prompt, output, tokens, arrival))
    if not requests:
        raise ConfigError(f"--dataset-path {supply.path}: no prompt fits")
    return Workload(tuple(requests), (f"{skipped} prompts did not fit into {supply.limit} tokens and were skipped",) if skipped else ())


DATASETS: dict[str, Callable[[Supply], Workload]] = {
    "random": _random,
    "random-ids": _random_ids,
    "generated-shared-prefix": _shared_prefix,
    "multi-turn": _multi_turn,
    "mooncake": lambda supply: _trace(supply, read_mooncake(supply.path, supply.options.num_prompts)),
    "azure": lambda supply: _trace(supply, read_azure(supply.path, supply.options.num_prompts)),
    "sharegpt": _sharegpt,
    "custom": _custom,
}
