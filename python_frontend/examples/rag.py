"""Retrieval-augmented answers: many questions about few documents.

Questions are grouped by the document that retrieval has found for them; each group is one program, which puts the document first and forks
for its questions. So a document is computed once, however many ask about it.

    python python_frontend/examples/rag.py http://127.0.0.1:30000
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence

import radixpd_lang as rx

DOCUMENTS = {
    "ferry": (
        "The ferry to the island runs from April to October. It leaves the north pier at 8, 11, 14 and 17 o'clock and needs forty"
        " minutes. A return ticket costs nine euros, for children under twelve five. Bicycles travel free of charge on the first "
        "and the last ferry of a day, on the others there is room for six. In a storm the ferry stays in the harbour, which is "
        "announced an hour before on the board at the pier and by telephone. Dogs are welcome on the upper deck. Who misses the "
        "last ferry finds beds in the old school house."
    ),
    "library": (
        "The library lends books for four weeks, films for one. A loan can be extended twice unless somebody else has reserved "
        "it. Late books cost twenty cents a day, films one euro. The reading room has thirty seats; five of them have a lamp and "
        "a socket and can be booked for half a day. Children have a card of their own from the age of six, which is free. The "
        "library is closed on Mondays and in the last week of the year. What is not on the shelves comes from the district's "
        "other libraries within three days."
    ),
}
QUESTIONS = (
    ("When does the last ferry leave?", ("ferry", "pier")),
    ("How long may I keep a film?", ("film", "book")),
    ("Can I take my bicycle on the ferry?", ("ferry", "bicycle")),
    ("Which day is the library closed?", ("library", "closed")),
    ("What does the ferry cost for a child?", ("ferry", "child")),
    ("Is there a fine for late books?", ("book", "late")),
    ("Where do I sleep when I miss the ferry?", ("ferry", "miss")),
    ("From which age on do children have a library card?", ("library", "card")),
    ("Does the ferry run in winter?", ("ferry", "october")),
    ("May my daughter extend a loan?", ("loan", "library")),
    ("How will I learn that a storm keeps the ferry in the harbour?", ("ferry", "storm")),
    ("Who can book a seat with a lamp?", ("seat", "lamp")),
    ("Are dogs allowed on the ferry?", ("ferry", "dog")),
    ("My book is not on the shelf; what now?", ("shelf", "library")),
    ("Tell me how long the ferry needs.", ("ferry", "minutes")),
    ("For how many weeks are books lent?", ("book", "weeks")),
)


def retrieve(words: Sequence[str]) -> str:
    """The name of the document in which these words are most frequent."""
    return max(DOCUMENTS, key=lambda name: sum(DOCUMENTS[name].lower().count(word) for word in words))


@rx.function
def ask_about(s: rx.ProgramState, document: str, questions: Sequence[str]) -> list[str]:
    """The answers to the questions."""
    s += rx.system("You answer from the given document alone, in a few words.")
    s += rx.user_begin() + f"Document: {document}\n\nQuestion: "
    branches = s.fork(len(questions))
    for branch, question in zip(branches, questions, strict=True):
        branch += question + rx.user_end()
        branch += rx.assistant(rx.gen("answer", max_tokens=24, stop="\n", temperature=0))
    return list(branches["answer"])


def run(backend: rx.Backend, *, size: int = 8, hints: bool = True) -> list[str]:
    """A line for each of `size` questions."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for index in range(size):
        question, words = QUESTIONS[index % len(QUESTIONS)]
        groups[retrieve(words)].append(question if index < len(QUESTIONS) else f"{question} (Asked again: {index})")
    batch = [{"document": DOCUMENTS[name], "questions": questions} for name, questions in groups.items()]
    states = ask_about.run_batch(batch, backend=backend, hints=hints)
    answers = [answer for state in states for answer in state.ret_value]
    return [f"{question} {answer}" for question, answer in zip((each for group in groups.values() for each in group), answers, strict=True)]


if __name__ == "__main__":
    print("\n".join(run(rx.RuntimeEndpoint(sys.argv[1]))))
