"""The runner against the contract of `core.step`, with a model whose logits prove what was read from where.

The fake attention writes each new token's id and position into the pool and answers with a hash of every (token, position) it then finds
through the page table. The next greedy token is that hash: one wrong page, position, token or copy changes all tokens that follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from radixpd.attention.base import AttentionInputs
from radixpd.core.request import LogprobParams, SamplingParams
from radixpd.core.step import PromptScores, Score, SlotBegin, StepPlan, StepResult
from radixpd.engine.runner import Runner
from radixpd.kv.layout import KVLayout
from radixpd.kv.pool import Pool

VOCAB, CONTEXT, SLOTS, PAGES = 97, 40, 6, 30
GREEDY = SamplingParams(temperature=0.0)


def context_hash(tokens: list[int]) -> int:
    """What the fake computes for the last of `tokens`, in plain Python."""
    value = 17
    for position, token in enumerate(tokens):
        value = (value * 31 + token * 7 + position) % 9973
    return value


def logits_of(value: int) -> torch.Tensor:
    """Logits that the fake gives for a hash: their argmax is the hash itself."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(value))
    logits[value % VOCAB] = 6.0
    return logits


class HashAttention:
    """Stores (token, position) as k and v, and hashes what the pages hold."""

    def __init__(self, layers: list[torch.Tensor]) -> None:
        self.layers = layers

    def plan(self, inputs: AttentionInputs) -> Callable[..., torch.Tensor]:
        size = inputs.page_size

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            pool, out = self.layers[layer], torch.empty_like(q)
            for row, last in enumerate(inputs.last_page_len.tolist()):
                begin, end = inputs.qo_indptr[row : row + 2].tolist()
                pages = inputs.indices[inputs.indptr[row] : inputs.indptr[row + 1]].tolist()
                total = (len(pages) - 1) * size + last
                places = [(pages[position // size], position % size) for position in range(total)]
                for flat, (page, place) in zip(range(begin, end), places[total - (end - begin) :], strict=True):
                    pool[page, 0, place], pool[page, 1, place] = k[flat], v[flat]
                for flat in range(begin, end):
                    seen = places[: total - (end - begin) + flat - begin + 1]
                    stored = [(int(pool[page, 0, place, 0, 0]), int(pool[page, 1, place, 0, 0])) for page, place in seen]
                    assert [position for _, position in stored] == list(range(len(stored)))
                    out[flat] = context_hash([token for token, _ in stored])
            return out

        return attend


class HashModel:
    """Hidden state: the hash of the context. Layer 1 must find what layer 0 found."""

    def __init__(self) -> None:
        self.rows_of_logits: list[int] = []

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        k, v = (x.float().view(-1, 1, 1) for x in (tokens, positions))
        first, second = attend(0, k, k, v), attend(1, k, k, v)
        assert torch.equal(first, second)
        return first.flatten(1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows_of_logits.append(len(hidden))
        return torch.stack([logits_of(int(value)) for value in hidden[:, 0]])


def make_runner(page_size: int = 4) -> Runner:
    pool = Pool(KVLayout(layers=2, kv_heads=1, head_dim=1, page_size=page_size, dtype="float32"), PAGES)
    # Whatever a page held before must not matter.
    for layer in pool.layers:
        layer.fill_(-1)
    return Runner(HashModel(), HashAttention(pool.layers), pool, slots=SLOTS, context_length=CONTEXT, vocab_size=VOCAB, eos_ids=(0,))


@pytest.fixture
def runner():
    runner = make_runner()
    yield runner
    runner.close()


class Driver:
    """Plays the brain: gives slots pages from a shuffled list and builds plans."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.free = np.random.default_rng(3).permutation(PAGES).tolist()
        self.pages: dict[int, list[int]] = {}
        self.steps = 0

    def grow(self, slot: int, length: int) -> list[tuple[int, int, int]]:
        """Page-table entries that let `slot` hold `length` tokens."""
        pages, entries = self.pages.setdefault(slot, []), []
        while len(pages) * self.runner.page_size < length:
            pages.append(self.free.pop())
            entries.append((slot, len(pages) - 1, pages[-1]))
        return entries

    def step(
        self,
        *rows: tuple[int, int, int],
        sample: tuple[tuple[int, int], ...] = (),
        begins: tuple[SlotBegin, ...] = (),
        entries: tuple[tuple[int, int, int], ...] = (),
        **more: object,
    ) -> StepResult:
        """One plan of (slot, start, length) rows and (row, slot) samples."""
        added = [entry for slot, start, length in rows for entry in self.grow(slot, start + length)] + list(entries)
        slots, starts, lengths = np.array(rows, dtype=np.int32).reshape(-1, 3).T
        sample_rows, sample_slots = np.array(sample, dtype=np.int32).reshape(-1, 2).T
        page_slots, page_positions, page_ids = np.array(added, dtype=np.int32).reshape(-1, 3).T
        plan = StepPlan(self.steps, slots, starts, lengths, sample_rows, sample_slots, page_slots, page_positions, page_ids, begins, **more)
        # As they come off the wire.
        for one in (plan.slots, plan.starts, plan.lengths, sample_rows, sample_slots, page_slots, page_positions, page_ids, plan.copies):
            one.setflags(write=False)
        self.steps += 1
        result = self.runner.step(plan)
        assert result.step == plan.step
        assert result.tokens.dtype == np.int32
        return result


def begin(slot: int, prompt: list[int], params: SamplingParams = GREEDY, *, output: tuple[int, ...] = (), sample: int = 0) -> SlotBegin:
    return SlotBegin(slot, np.array([*prompt, *output], dtype=np.int32), len(prompt), sample, params)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def continued(prompt: list[int], count: int) -> list[int]:
    """Greedy output of the fake model, computed from the whole context each time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(context_hash(tokens) % VOCAB)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("cut", [1, 3, 4, 10, 11])
def test_prefill_in_any_chunks_then_decode(page_size, cut):
    runner = make_runner(page_size)
    drive, prompt = Driver(runner), prompt_of(11)
    output = []
    for start in range(0, 11, cut):
        length = min(cut, 11 - start)
        last = start + length == 11
        result = drive.step((2, start, length), sample=((0, 2),) if last else (), begins=(begin(2, prompt),) if start == 0 else ())
        output += result.tokens.tolist()
    assert len(output) == 1
    for position in range(11, 18):
        output += drive.step((2, position, 1), sample=((0, 2),)).tokens.tolist()
    assert output == continued(prompt, 8)
    runner.close()


def test_prefill_and_decode_rows_mix_in_one_plan(runner):
    drive, prompts = Driver(runner), [prompt_of(6, 1), prompt_of(9, 2), prompt_of(3, 3)]
    outputs = [[], [], []]

    def keep(result: StepResult, slots: tuple[int, ...]) -> None:
        for slot, token in zip(slots, result.tokens.tolist(), strict=True):
            outputs[slot].append(token)

    keep(drive.step((0, 0, 6), sample=((0, 0),), begins=(begin(0, prompts[0]),)), (0,))
    keep(drive.step((1, 0, 5), (0, 6, 1), sample=((1, 0),), begins=(begin(1, prompts[1]),)), (0,))
    # Samples need not come in the order of their rows.
    keep(drive.step((0, 7, 1), (2, 0, 3), (1, 5, 4), sample=((2, 1), (0, 0), (1, 2)), begins=(begin(2, prompts[2]),)), (1, 0, 2))
    keep(drive.step((2, 3, 1), (1, 9, 1), sample=((0, 2), (1, 1))), (2, 1))
    assert outputs == [continued(prompts[0], 3), continued(prompts[1], 2), continued(prompts[2], 2)]


def test_a_cached_prefix_is_read_where_another_slot_left_it(runner):
    drive, shared = Driver(runner), prompt_of(8, 4)
    first, second = [*shared, 5, 6], [*shared, 7]
    drive.step((0, 0, 10), sample=((0, 0),), begins=(begin(0, first),))
    pages = drive.pages[0][:2]
    drive.pages[3] = list(pages)
    result = drive.step(
        (3, 8, 1), sample=((0, 3),), begins=(begin(3, second),), entries=tuple((3, place, page) for place, page in enumerate(pages))
    )
    assert result.tokens.tolist() == continued(second, 1)


def test_logits_are_computed_for_asked_rows_only_and_once_for_n_samples(runner):
    drive, prompt = Driver(runner), prompt_of(7)
    hot = SamplingParams(temperature=3.0, seed=5)
    drive.step((1, 0, 7), begins=(begin(1, prompt),))
    assert runner.model.rows_of_logits == []
    begins = (begin(0, prompt), *(begin(slot, prompt, hot, sample=slot) for slot in (2, 3, 4)))
    drive.step((0, 0, 7), (1, 7, 1), sample=((0, 0), (0, 2), (0, 3), (0, 4)), begins=begins)
    assert runner.model.rows_of_logits == [1]


def test_a_fork_copies_the_partial_page_after_the_forward_that_fills_it(runner):
    drive, prompt = Driver(runner), prompt_of(10)
    hot = SamplingParams(temperature=50.0, seed=8)
    drive.grow(0, 10)
    targets = [drive.free.pop(), drive.free.pop()]
    entries = []
    for slot, target in zip((4, 5), targets, strict=True):
        drive.pages[slot] = [*drive.pages[0][:2], target]
        entries += [(slot, place, page) for place, page in enumerate(drive.pages[slot])]
    entries += [(0, place, page) for place, page in enumerate(drive.pages[0])]
    copies = np.array([[drive.pages[0][2], target] for target in targets], dtype=np.int32)
    begins = (begin(0, prompt, hot), begin(4, prompt, hot, sample=1), begin(5, prompt, hot, sample=2))
    first = drive.step((0, 0, 10), sample=((0, 0), (0, 4), (0, 5)), begins=begins, entries=tuple(entries), copies=copies).tokens
    assert len(set(first.tolist())) > 1
    greedy = [begin(slot, prompt, GREEDY, output=(int(token),)) for slot, token in zip((0, 4, 5), first, strict=True)]
    second = drive.step((0, 10, 1), (4, 10, 1), (5, 10, 1), sample=((0, 0), (1, 4), (2, 5)), begins=tuple(greedy)).tokens
    assert second.tolist() == [continued([*prompt, int(token)], 1)[0] for token in first]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_tokens_after_a_retraction(temperature, runner):
    drive, prompt = Driver(runner), prompt_of(6)
    params = SamplingParams(
        temperature=temperature, seed=3, frequency_penalty=3.0, repetition_penalty=1.5, min_new_tokens=7, logit_bias=((0, 8.0),)
    )
    output = drive.step((0, 0, 6), sample=((0, 0),), begins=(begin(0, prompt, params),)).tokens.tolist()
    for position in range(6, 14):
        output += drive.step((0, position, 1), sample=((0, 0),)).tokens.tolist()
    for cut in (1, 5, 8):
        known = tuple(output[:cut])
        drive.pages[1] = []
        again = drive.step((1, 0, 6 + cut), sample=((0, 1),), begins=(begin(1, prompt, params, output=known),)).tokens.tolist()
        drive.free += drive.pages[1]
        assert again == output[cut : cut + 1]
    assert 0 not in output[:7]


def test_a_reused_slot_reads_nothing_of_its_last_request(runner):
    drive = Driver(runner)
    drive.step((0, 0, 12), sample=((0, 0),), begins=(begin(0, prompt_of(12, 1)),))
    drive.free += drive.pages.pop(0)
    result = drive.step((0, 0, 5), sample=((0, 0),), begins=(begin(0, prompt_of(5, 2)),))
    assert result.tokens.tolist() == continued(prompt_of(5, 2), 1)


def test_the_token_after_the_contexts_last_position_has_a_place(runner):
    drive, prompt = Driver(runner), prompt_of(CONTEXT)
    result = drive.step((SLOTS - 1, 0, CONTEXT), sample=((0, SLOTS - 1),), begins=(begin(SLOTS - 1, prompt),))
    assert result.tokens.tolist() == continued(prompt, 1)


def test_a_plan_without_rows_still_begins_places_and_copies(runner):
    drive, prompt = Driver(runner), prompt_of(6)
    drive.step((0, 0, 6), begins=(begin(0, prompt),))
    first, second = drive.pages[0]
    moved = drive.free.pop()
    result = drive.step(
        begins=(begin(1, prompt),), entries=((1, 0, first), (1, 1, moved)), copies=np.array([[second, moved]], dtype=np.int32)
    )
    assert (result.tokens.tolist(), result.logprobs, result.scores) == ([], (), ())
    drive.pages[1] = [first, moved]
    assert drive.step((1, 5, 1), sample=((0, 1),)).tokens.tolist() == continued(prompt, 1)


def test_logprobs_of_sampled_tokens_are_of_the_raw_logits(runner):
    drive, prompt = Driver(runner), prompt_of(6)
    asks = SamplingParams(temperature=0.5, top_k=4, logit_bias=((3, 100.0),), logprobs=LogprobParams(top=2, token_ids=(9,)))
    result = drive.step((0, 0, 6), (1, 0, 6), sample=((1, 1), (0, 0)), begins=(begin(0, prompt, asks), begin(1, prompt)))
    raw = logits_of(context_hash(prompt)).log_softmax(-1)
    none, ours = result.logprobs
    assert none is None
    assert result.tokens[1] == 3
    assert ours.logprob == pytest.approx(float(raw[3]), abs=1e-5)
    assert ours.top_ids.tolist() == raw.topk(2).indices.tolist()
    assert ours.asked.tolist() == pytest.approx([float(raw[9])], abs=1e-5)


def joined(parts: list[PromptScores]) -> list[float]:
    """All logprobs of consecutive parts, which must leave no gap."""
    for part, following in itertools.pairwise(parts):
        assert following.first == part.first + len(part.logprobs)
    return [float(value) for part in parts for value in part.logprobs]


@pytest.mark.parametrize("cut", [1, 2, 5, 11])
@pytest.mark.parametrize("start", [0, 3, 9])
def test_prompt_scores_across_chunks(cut, start, runner):
    drive, prompt = Driver(runner), prompt_of(11)
    params = SamplingParams(temperature=0.0, logprobs=LogprobParams(top=2, start=start))
    expected = [float(logits_of(context_hash(prompt[:place])).log_softmax(-1)[prompt[place]]) for place in range(max(start, 1), 11)]
    parts = []
    for begun in range(0, 11, cut):
        length, first = min(cut, 11 - begun), max(begun, start - 1, 0)
        last = begun + length == 11
        scores = (Score(0, first),) if first < begun + length else ()
        begins = (begin(4, prompt, params),) if begun == 0 else ()
        result = drive.step((4, begun, length), sample=((0, 4),) if last else (), begins=begins, scores=scores)
        parts += result.scores
    parts = [part for part in parts if len(part.logprobs)]
    assert parts[0].first == max(start, 1)
    assert joined(parts) == pytest.approx(expected, abs=1e-5)
    assert parts[0].top_ids[0].tolist() == logits_of(context_hash(prompt[: parts[0].first])).topk(2).indices.tolist()


def test_scores_of_a_row_that_is_not_the_first_in_its_plan(runner):
    drive, other, prompt = Driver(runner), prompt_of(5, 1), prompt_of(8, 2)
    params = SamplingParams(temperature=0.0, logprobs=LogprobParams(start=0))
    result = drive.step(
        (0, 0, 5), (1, 0, 8), sample=((0, 0), (1, 1)), begins=(begin(0, other), begin(1, prompt, params)), scores=(Score(1, 0),)
    )
    expected = [float(logits_of(context_hash(prompt[:place])).log_softmax(-1)[prompt[place]]) for place in range(1, 8)]
    assert result.scores[0].first == 1
    assert result.scores[0].logprobs.tolist() == pytest.approx(expected, abs=1e-5)
    assert result.tokens.tolist() == continued(other, 1) + continued(prompt, 1)
