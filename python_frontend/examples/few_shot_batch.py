"""Few-shot classification of many reviews: one program, one batch.

All prompts begin with the same examples. `run_batch` finds that out by itself and lets the server compute them once, before the batch.

    python python_frontend/examples/few_shot_batch.py http://127.0.0.1:30000
"""

from __future__ import annotations

import sys

import radixpd_lang as rx

SHOTS = (
    ("The soup was cold and the waiter rude.", "negative"),
    ("Best bread in town, and they remember your name.", "positive"),
    ("It is a shop. It sells shoes.", "neutral"),
    ("I waited forty minutes for a table that I had booked.", "negative"),
    ("The view alone is worth the climb.", "positive"),
    ("They open at nine and close at five.", "neutral"),
)
REVIEWS = (
    "The coffee tastes like it was made yesterday.",
    "Friendly people, quick repair, fair price.",
    "The museum is on the second floor.",
    "My room smelled of smoke and nobody cared.",
    "We laughed all evening, what a show!",
    "The bus stops in front of the door.",
    "The cake was dry, and so was the humour of the owner.",
    "A quiet garden in the middle of the noise: lovely.",
)
LABELS = ("positive", "neutral", "negative")


@rx.function
def classify(s: rx.ProgramState, review: str) -> None:
    """The mood of a review."""
    s += "Each review is followed by its mood: positive, neutral or negative.\n\n"
    for text, label in SHOTS:
        s += f"Review: {text}\nMood: {label}\n\n"
    s += f"Review: {review}\nMood: " + rx.select("mood", LABELS)


def run(backend: rx.Backend, *, size: int = 8, hints: bool = True) -> list[str]:
    """A line for each of `size` reviews."""
    reviews = [REVIEWS[index % len(REVIEWS)] + " Again." * (index // len(REVIEWS)) for index in range(size)]
    states = classify.run_batch([{"review": review} for review in reviews], backend=backend, hints=hints)
    return [f"{state['mood']}: {review}" for review, state in zip(reviews, states, strict=True)]


if __name__ == "__main__":
    print("\n".join(run(rx.RuntimeEndpoint(sys.argv[1]))))
