"""What each sampling parameter does to the tokens of a slot, and that nothing else does anything to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixpd.core.request import SamplingParams
from radixpd.core.step import SlotBegin
from radixpd.engine.draw import least_of_top_p
from radixpd.engine.sampler import Sampler

VOCAB = 300
EOS = (7, 9)


def begin(slot: int, params: SamplingParams, *, prompt: list[int] | None = None, output: list[int] | None = None, sample: int = 0):
    prompt = prompt or [1, 2, 3]
    tokens = np.array(prompt + (output or []), dtype=np.int32)
    return SlotBegin(slot=slot, tokens=tokens, prompt_length=len(prompt), sample=sample, params=params)


def sampler_of(*begins: SlotBegin, slots: int = 64) -> Sampler:
    sampler = Sampler(slots=slots, vocab_size=VOCAB, eos_ids=EOS)
    for one in begins:
        sampler.begin(one)
    return sampler


def run(logits: torch.Tensor, params: SamplingParams, *, steps: int = 1, prompt: list[int] | None = None, output: list[int] | None = None):
    """Tokens that one slot samples when every step has the same logits."""
    start = begin(0, params, prompt=prompt, output=output)
    sampler = sampler_of(start)
    first = len(start.tokens)
    zero = np.zeros(1, dtype=np.int64)
    return [int(sampler.sample(logits[None], which=zero, slots=zero, positions=np.array([first + step]))[0]) for step in range(steps)]


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 2


def pulled(logits: torch.Tensor, *ids: int) -> torch.Tensor:
    """Logits whose largest are `ids`, best first, one apart."""
    logits = logits.clamp(max=3.0).clone()
    logits[list(ids)] = torch.arange(len(ids), 0, -1, dtype=torch.float32) + 4
    return logits


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, top_p=0.1, top_k=40, min_p=0.9, seed=3),
        SamplingParams(temperature=5.0, top_k=1),
        SamplingParams(temperature=0.0, min_new_tokens=1),
        SamplingParams(temperature=2.0, min_p=1.0),
        SamplingParams(temperature=2.0, top_p=1e-9),
    ],
)
def test_greedy_in_every_spelling_is_the_argmax(params, logits):
    best = int(pulled(logits, 200, 100).argmax())
    assert run(pulled(logits, 200, 100), params, steps=20) == [best] * 20 == [200] * 20


def test_ties_go_to_the_lowest_id(logits):
    tied = pulled(logits, 250)
    tied[[40, 250]] = 9.0
    assert run(tied, SamplingParams(temperature=0.0)) == [40]
    assert run(tied, SamplingParams(temperature=0.0, min_new_tokens=5)) == [40]
    assert run(tied, SamplingParams(temperature=5.0, top_k=1), steps=20) == [40] * 20


def test_temperature_two_without_other_fields_varies(logits):
    assert len({run(logits, SamplingParams(temperature=2.0, seed=seed))[0] for seed in range(6)}) >= 2


def test_a_lower_temperature_is_sharper(logits):
    best = int(logits.argmax())
    shares = [run(logits, SamplingParams(temperature=t), steps=400).count(best) for t in (0.2, 0.7, 2.0)]
    assert shares[0] > shares[1] > shares[2]


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(temperature=3.0, top_k=3), {200, 100, 50}),
        (SamplingParams(temperature=1.0, top_p=0.6), {200, 100}),
        (SamplingParams(temperature=1.0, min_p=0.3), {200, 100}),
        # Of the three that top-k leaves, two hold 91 % of the mass; of the whole vocabulary they would not.
        (SamplingParams(temperature=1.0, top_k=3, top_p=0.8), {200, 100}),
    ],
)
def test_filters_leave_exactly_their_tokens(params, allowed, logits):
    assert set(run(pulled(logits.clamp(max=1.0), 200, 100, 50), params, steps=300)) == allowed


def test_filters_keep_ties():
    flat = torch.zeros(VOCAB)
    flat[:4] = 10.0
    assert set(run(flat, SamplingParams(top_k=2), steps=200)) == {0, 1, 2, 3}


def test_top_p_beyond_the_usual_nucleus_is_exact():
    # A nearly flat distribution over a large vocabulary: the nucleus is larger than what is looked at first.
    probs = torch.softmax(torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)) * 0.1, dim=-1)
    least = least_of_top_p(probs, torch.tensor([0.9, 0.01, 0.5], dtype=torch.float64))
    for row, share in zip(range(3), (0.9, 0.01, 0.5), strict=True):
        order = probs[row].sort(descending=True).indices
        mass = probs[row][order].double().cumsum(0)
        count = int((mass < share * mass[-1]).sum()) + 1
        assert set((probs[row] >= least[row]).nonzero()[:, 0].tolist()) == set(order[:count].tolist())


def test_sampled_shares_follow_the_distribution(logits):
    few = logits[:24].clone()
    sampler = Sampler(slots=1, vocab_size=24, eos_ids=())
    sampler.begin(begin(0, SamplingParams(temperature=1.3, seed=11)))
    draws, zero = 4000, np.zeros(1, dtype=np.int64)
    seen = np.zeros(24)
    for position in range(draws):
        seen[sampler.sample(few[None], which=zero, slots=zero, positions=np.array([3 + position]))] += 1
    expected = torch.softmax(few.double() / 1.3, -1).numpy() * draws
    # 23 degrees of freedom: chi-square exceeds 49.7 once in a thousand seeds, and the seed is fixed.
    assert (((seen - expected) ** 2) / expected).sum() < 49.7


def test_samples_of_one_request_and_equal_prompts_differ(logits):
    params = [SamplingParams(temperature=1.5, seed=seed) for seed in range(6)]
    many = sampler_of(*(begin(slot, p) for slot, p in enumerate(params)))
    tokens = many.sample(logits[None], which=np.zeros(6, dtype=np.int64), slots=np.arange(6), positions=np.full(6, 3))
    assert len(set(tokens.tolist())) >= 2
    forks = sampler_of(*(begin(slot, SamplingParams(temperature=1.5, seed=4), sample=slot) for slot in range(6)))
    tokens = forks.sample(logits[None], which=np.zeros(6, dtype=np.int64), slots=np.arange(6), positions=np.full(6, 3))
    assert len(set(tokens.tolist())) >= 2


def test_the_seed_decides(logits):
    hot = SamplingParams(temperature=2.0, seed=1)
    assert run(logits, hot, steps=30) == run(logits, hot, steps=30)
    assert run(logits, hot, steps=30) != run(logits, SamplingParams(temperature=2.0, seed=2), steps=30)


def test_logit_bias_moves_a_token_both_ways(logits):
    best = int(logits.argmax())
    assert run(logits, SamplingParams(temperature=0.0, logit_bias=((33, 100.0),))) == [33]
    assert run(logits, SamplingParams(temperature=0.0, logit_bias=((best, -100.0),))) != [best]
    assert run(logits, SamplingParams(temperature=1.0, logit_bias=((33, 100.0),)), steps=20) == [33] * 20


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0}])
def test_output_penalties_break_a_loop_and_ignore_the_prompt(penalty, logits):
    loop = pulled(logits, 200, 100)
    assert run(loop, SamplingParams(temperature=0.0), steps=8) == [200] * 8
    tokens = run(loop, SamplingParams(temperature=0.0, **penalty), steps=8, prompt=[200, 200])
    assert tokens[:2] == [200, 100]
    assert tokens.count(200) < 8


def test_frequency_penalty_counts_and_presence_does_not(logits):
    loop = pulled(logits, 200, 100)
    loop[200] += 5
    assert run(loop, SamplingParams(temperature=0.0, presence_penalty=2.0), steps=12) == [200] * 12
    assert run(loop, SamplingParams(temperature=0.0, frequency_penalty=1.0), steps=12) != [200] * 12


def test_repetition_penalty_covers_prompt_and_output_on_both_sides_of_zero(logits):
    loop = pulled(logits, 200, 100)
    assert run(loop, SamplingParams(temperature=0.0, repetition_penalty=1.8), prompt=[200]) == [100]
    tokens = run(loop, SamplingParams(temperature=0.0, repetition_penalty=1.8), steps=4)
    assert len(set(tokens[:2])) == 2
    below = -pulled(logits, 200).abs() - 1
    below[200] = -0.5
    below[100] = -0.7
    assert run(below, SamplingParams(temperature=0.0, repetition_penalty=1.8), prompt=[200]) == [100]


def test_min_new_tokens_bars_every_end_until_it_is_reached(logits):
    ends = pulled(logits, 7, 9, 30, 31)
    params = SamplingParams(temperature=0.0, min_new_tokens=3, stop_token_ids=(30, 10**9))
    assert run(ends, params, steps=5) == [31, 31, 31, 7, 7]
    assert run(ends, SamplingParams(temperature=0.0, ignore_eos=True), steps=2) == [7, 7]


def assorted(seed: int) -> SamplingParams:
    pick = np.random.default_rng(seed)
    return SamplingParams(
        temperature=float(pick.choice([0.0, 0.7, 1.8])),
        top_k=int(pick.choice([-1, 1, 5, 50])),
        top_p=float(pick.choice([1.0, 0.9, 0.3])),
        min_p=float(pick.choice([0.0, 0.05])),
        frequency_penalty=float(pick.choice([0.0, 0.5])),
        repetition_penalty=float(pick.choice([1.0, 1.3])),
        min_new_tokens=int(pick.choice([0, 4])),
        logit_bias=((int(pick.integers(VOCAB)), 1.5),) if pick.integers(2) else (),
        seed=seed,
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_token_is_the_same_alone_and_in_any_batch(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        count, steps = 40, 6
        rows = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
        begins = [begin(slot, assorted(slot)) for slot in range(count)]
        together, order = sampler_of(*begins), np.random.default_rng(0).permutation(count)
        batched = []
        for step in range(steps):
            tokens = np.empty(count, dtype=np.int32)
            tokens[order] = together.sample(rows, which=order, slots=order, positions=np.full(count, 3 + step))
            batched.append(tokens)
        for slot in range(count):
            alone = sampler_of(begins[slot])
            for step in range(steps):
                one = alone.sample(
                    rows[slot : slot + 1], which=np.zeros(1, dtype=int), slots=np.array([slot]), positions=np.array([3 + step])
                )
                assert one[0] == batched[step][slot]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(12))
def test_a_slot_that_begins_again_goes_on_with_the_same_tokens(seed, logits):
    params = assorted(seed)
    whole = run(logits, params, steps=10)
    for cut in (1, 4, 9):
        assert run(logits, params, steps=10 - cut, output=whole[:cut]) == whole[cut:]


def test_a_slot_forgets_its_last_request(logits):
    loop = pulled(logits, 200, 100)
    sampler = sampler_of(begin(0, SamplingParams(temperature=0.0, presence_penalty=2.0, logit_bias=((5, 100.0),), min_new_tokens=4)))
    zero = np.zeros(1, dtype=np.int64)
    assert sampler.sample(loop[None], which=zero, slots=zero, positions=np.array([3]))[0] == 5
    sampler.begin(begin(0, SamplingParams(temperature=0.0)))
    assert sampler.sample(loop[None], which=zero, slots=zero, positions=np.array([3]))[0] == 200


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), assorted(1), assorted(4), SamplingParams(top_p=0.9, top_k=20, min_p=0.1)]
)
def test_broken_logits_give_a_token_and_a_nan_never_wins(params, logits):
    broken = pulled(logits, 200)
    broken[17] = torch.nan
    assert run(broken, params) != [17]
    for value in (torch.nan, torch.inf, -torch.inf):
        assert 0 <= run(torch.full((VOCAB,), value), params)[0] < VOCAB
    broken[18] = torch.inf
    assert run(broken, SamplingParams(temperature=0.5)) == [18]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_every_token_is_barred_gives_a_token(temperature, logits):
    barred = SamplingParams(temperature=temperature, min_new_tokens=5, stop_token_ids=tuple(range(VOCAB)), top_p=0.9, top_k=20, min_p=0.1)
    assert 0 <= run(logits, barred)[0] < VOCAB


def test_a_broken_row_leaves_its_neighbours_alone(logits):
    rows = torch.stack([pulled(logits, 200), torch.full((VOCAB,), torch.nan)])
    sampler = sampler_of(begin(0, SamplingParams(temperature=0.0)), begin(1, SamplingParams(temperature=0.0)))
    assert sampler.sample(rows, which=np.arange(2), slots=np.arange(2), positions=np.array([3, 3])).tolist() == [200, 0]


def test_sampling_leaves_the_logits_as_they_are(logits):
    kept = logits.clone()
    run(logits, SamplingParams(temperature=1.0, frequency_penalty=1.0, logit_bias=((1, 5.0),), min_new_tokens=2, top_k=5), steps=3)
    assert torch.equal(kept, logits)
