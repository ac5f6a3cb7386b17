"""A model as judge: one essay, several points of view at the same time, then a verdict.

The essay is the prefix of all branches; the server computes it once. Each branch writes a remark and chooses a grade; the verdict reads
the remarks through lazy variables, so nothing waits before it must.

    python python_frontend/examples/judge.py http://127.0.0.1:30000
"""

from __future__ import annotations

import sys

import radixpd_lang as rx

ESSAY = (
    "Cities should plant more trees. A tree cools its street on a hot day, because it gives shade and because water evaporates "
    "from its leaves. It holds back rain that would otherwise fill the sewers, and it gives birds a place to nest. Some say that "
    "trees cost money and that their roots break the pavement. This is true, but a broken pavement can be mended within a day, "
    "while a street without shade stays hot for decades. Others fear for parking places. A street is more than a place for cars: "
    "it is where neighbours meet, and nobody meets under the sun at noon. So every street that is dug up for a pipe should be "
    "closed again with a tree."
)
DIMENSIONS = ("clarity", "evidence", "originality", "style")
GRADES = ("excellent", "good", "weak")


@rx.function
def judge(s: rx.ProgramState, essay: str) -> dict[str, str]:
    """A grade for each dimension."""
    s += rx.system("You are a careful teacher. You judge essays in one sentence.")
    s += rx.user(f"Here is an essay.\n\n{essay}")
    s += rx.assistant("I have read it. Which point of view shall I take?")
    branches = s.fork(len(DIMENSIONS))
    for branch, dimension in zip(branches, DIMENSIONS, strict=True):
        branch += rx.user(f"Judge its {dimension}: one sentence, then excellent, good or weak.")
        branch += rx.assistant(rx.gen("remark", max_tokens=32, stop=["\n", "."], temperature=0) + ". Grade: " + rx.select("grade", GRADES))
    remarks = rx.user_begin() + "Sum up these remarks in one sentence.\n"
    for branch, dimension in zip(branches, DIMENSIONS, strict=True):
        remarks = remarks + f"{dimension}: " + branch.var("remark") + "\n"
    s += remarks + rx.user_end()
    s += rx.assistant(rx.gen("verdict", max_tokens=32, stop="\n", temperature=0))
    return dict(zip(DIMENSIONS, branches["grade"], strict=True))


def run(backend: rx.Backend, *, size: int = 1, hints: bool = True) -> list[str]:
    """Grades and verdict for `size` essays."""
    essays = [f"{ESSAY} (Draft {index + 1})" for index in range(size)]
    states = judge.run_batch([{"essay": essay} for essay in essays], backend=backend, hints=hints)
    return [", ".join(f"{name}: {grade}" for name, grade in state.ret_value.items()) + " | " + state["verdict"] for state in states]


if __name__ == "__main__":
    print("\n".join(run(rx.RuntimeEndpoint(sys.argv[1]))))
