"""Conversations of several turns: each prompt is the one before, the answer, and the next question.

The server finds all but the last question in its cache. Roles go through the chat template of the served model.

    python python_frontend/examples/multi_turn_chat.py http://127.0.0.1:30000
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import radixpd_lang as rx

PERSONA = (
    "You are the guide of a small harbour museum. You answer in one or two short sentences, you never invent numbers, and if you do not "
    "know something you say so and name the reading room on the first floor, which is open from ten to four."
)
QUESTIONS = (
    "What can I see here with two children?",
    "Which of these takes the least time?",
    "And if it rains?",
    "Where can we eat afterwards?",
)


@rx.function
def talk(s: rx.ProgramState, name: str, questions: Sequence[str]) -> list[str]:
    """The answers to the questions."""
    s += rx.system(PERSONA)
    answers = []
    for index, question in enumerate(questions):
        s += rx.user(f"I am {name}. {question}" if index == 0 else question)
        s += rx.assistant(rx.gen("answer", max_tokens=32, temperature=0))
        answers.append(s["answer"])
    return answers


def run(backend: rx.Backend, *, size: int = 2, hints: bool = True) -> list[str]:
    """The answers in `size` conversations."""
    batch = [{"name": f"visitor {index + 1}", "questions": QUESTIONS} for index in range(size)]
    return [" | ".join(state.ret_value) for state in talk.run_batch(batch, backend=backend, hints=hints)]


if __name__ == "__main__":
    print("\n".join(run(rx.RuntimeEndpoint(sys.argv[1]))))
