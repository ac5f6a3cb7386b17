"""Choosing: each method picks what it documents, and choices are compared from the first token in which they differ."""

from __future__ import annotations

import math
from typing import Any

import pytest
import radixpd_lang as rx
from gates import SECONDS
from hypothesis import given, settings
from hypothesis import strategies as st
from radixpd_lang.choices import ChoicesMethod, Scores, decide, first_difference

# "long and predictable" has the best mean, "first" the best first token, "rare" gains most from the prompt.
CHOICES = ("long and predictable", "first", "rare")
GIVEN = ((-1.5, -0.01, -0.01), (-0.9,), (-1.1, -1.1))
ALONE = ((-1.0, -0.01, -0.01), (-0.8,), (-9.0, -1.0))


@pytest.mark.parametrize(
    ("method", "winner"),
    [
        (None, "long and predictable"),
        ("token_length_normalized", "long and predictable"),
        ("greedy_token_selection", "first"),
        (ChoicesMethod.UNCONDITIONAL_LIKELIHOOD_NORMALIZED, "rare"),
        (rx.greedy_token_selection, "first"),
    ],
)
def test_fe_02_each_method_picks_the_one_it_documents(method: Any, winner: str) -> None:
    table = {(given, choice): row for given, rows in ((True, GIVEN), (False, ALONE)) for choice, row in zip(CHOICES, rows, strict=True)}
    fake = rx.Fake(scores=lambda prompt, choice: table[prompt is not None, choice])

    def body(s: rx.ProgramState) -> None:
        s += "Which? " + (rx.select("choice", CHOICES, choices_method=method) if method else rx.gen("choice", choices=CHOICES)) + "."

    state = rx.function(body).run(backend=fake, timeout=SECONDS)
    assert state["choice"] == winner
    assert state.text() == f"Which? {winner}."
    meta = state.get_meta_info("choice")
    assert meta["input_token_logprobs"] == [list(row) for row in GIVEN]
    assert max(meta["normalized_prompt_logprobs"]) == meta["normalized_prompt_logprobs"][CHOICES.index(winner)]


def test_greedy_goes_token_by_token_and_ended_choices_go_on_with_their_mean() -> None:
    method = ChoicesMethod.GREEDY_TOKEN_SELECTION
    assert decide(method, Scores(((-1.0, -3.0), (-1.0, -2.0), (-1.5,)))).index == 1
    assert decide(method, Scores(((-1.0,), (-1.0, -2.0)))).index == 0  # goes on with -1.0
    assert decide(method, Scores(((-1.0,), (-1.0, -0.5)))).index == 1
    assert decide(method, Scores(((-1.0, -3.0), (-1.0, -2.0), (-1.5,)))).figures == (-math.inf, -1.5, -math.inf)


def test_the_first_of_equals_wins() -> None:
    scores = Scores(((-1.0, -1.0),) * 3, ((-1.0, -1.0),) * 3)
    assert [decide(method, scores).index for method in ChoicesMethod] == [0, 0, 0]


@pytest.mark.parametrize(
    ("prompt", "wholes", "start"),
    [
        ("ab", ["abcd", "abxy"], 2),  # right after the prompt
        ("ab", ["ab_cd", "ab_xy"], 3),  # after what both choices begin with
        ("ab", ["aBcd", "axyz"], 1),  # the border's token differs in context
        ("ab_", ["abCd", "abXy"], 2),  # a space of the prompt has become part of the choices' tokens
        ("ab", ["abc", "abcd"], 2),  # one begins the other: the whole choices count
        ("ab", ["abcde"], 2),  # a choice alone
        ("abc", ["abc", "abcd"], 2),  # a choice that is in the prompt's last token still has one
        ("", ["x", "y"], 0),
    ],
)
def test_where_scores_begin(prompt: str, wholes: list[str], start: int) -> None:
    assert first_difference(prompt, wholes) == start


@given(st.text("ab", max_size=4), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4, unique=True))
@settings(max_examples=200, deadline=None)
def test_every_choice_has_a_token_and_nothing_in_which_they_differ_is_left_out(prompt: str, choices: list[str]) -> None:
    wholes = [prompt + choice for choice in choices]
    start = first_difference(prompt, wholes)
    assert all(len(whole) > start for whole in wholes)
    assert len({whole[:start] for whole in wholes}) == 1
    assert len({whole[start:] for whole in wholes}) == len(wholes)
