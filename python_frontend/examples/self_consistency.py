"""Self-consistency: the same question is reasoned through several times, the commonest answer wins.

One fork, as wide as there are samples: the question is computed once. `seed` makes the whole program repeat: every `gen` draws its own
from it.

    python python_frontend/examples/self_consistency.py http://127.0.0.1:30000
"""

from __future__ import annotations

import sys
from collections import Counter

import radixpd_lang as rx

WORKED = (
    ("A box holds 12 eggs. Four are broken. How many are whole?", "12 eggs less 4 broken ones are 8.", "8"),
    ("Anna reads 15 pages a day. How many in a week?", "A week has 7 days, and 7 times 15 is 105.", "105"),
    ("A train leaves at 9 and arrives at 14 o'clock. How long does it take?", "From 9 to 14 o'clock are 5 hours.", "5"),
)
QUESTIONS = (
    "Tom has 3 bags of 7 marbles and loses 4 marbles. How many are left?",
    "A ticket costs 6 euros, children pay half. What do two adults and two children pay?",
    "A garden is 8 metres long and 5 metres wide. How long is the fence around it?",
)


@rx.function
def answer(s: rx.ProgramState, question: str, samples: int) -> str:
    """The answer that most of the samples give."""
    for asked, thought, number in WORKED:
        s += f"Question: {asked}\nThought: {thought}\nAnswer: {number}\n\n"
    s += f"Question: {question}\nThought:"
    branches = s.fork(samples)
    branches += rx.gen("thought", max_tokens=32, stop="\n", temperature=0.7) + "\nAnswer:" + rx.gen("number", max_tokens=6, stop="\n")
    votes: Counter[str] = Counter(number.strip().rstrip(".") for number in branches["number"])
    return votes.most_common(1)[0][0]


def run(backend: rx.Backend, *, size: int = 3, hints: bool = True, samples: int = 5) -> list[str]:
    """The answers to `size` questions."""
    questions = [QUESTIONS[index % len(QUESTIONS)] for index in range(size)]
    batch = [{"question": question, "samples": samples} for question in questions]
    states = answer.run_batch(batch, backend=backend, hints=hints, seed=7, temperature=0)
    return [f"{state.ret_value}: {question}" for question, state in zip(questions, states, strict=True)]


if __name__ == "__main__":
    print("\n".join(run(rx.RuntimeEndpoint(sys.argv[1]))))
