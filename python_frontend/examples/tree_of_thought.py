"""Tree of thought: several next steps are tried at once, the most promising one is followed.

The state at every level is a prefix of all its branches, so the server computes it once however wide the tree is. A step is judged with
`select`: the figure that decides is how likely the model finds "good".

    python python_frontend/examples/tree_of_thought.py http://127.0.0.1:30000
"""

from __future__ import annotations

import sys

import radixpd_lang as rx

PROBLEM = (
    "A farmer stands at a river with a wolf, a goat and a cabbage. The boat carries the farmer and one of them. Left alone, the wolf eats "
    "the goat, and the goat eats the cabbage. How does everything get across?"
)
VERDICTS = ("good", "bad")


@rx.function
def solve(s: rx.ProgramState, problem: str, width: int, depth: int) -> list[str]:
    """The steps that were followed."""
    s += f"Problem: {problem}\n\nLet us think step by step, in short steps.\n"
    here, steps = s, []
    for level in range(1, depth + 1):
        branches = here.fork(width)
        for branch in branches:
            branch += f"Step {level}:" + rx.gen("step", max_tokens=24, stop="\n", temperature=0.8)
        promise = _promise(branches)
        here = branches[promise.index(max(promise))]
        here += "\n"
        steps.append(here["step"])
    here += "Answer:" + rx.gen("answer", max_tokens=32, stop="\n", temperature=0)
    return [*steps, here["answer"]]


def _promise(branches: rx.Forks) -> list[float]:
    """How likely the model finds it, for each branch, that its last step is a good one. All are asked before any is read."""
    judges = [branch.fork()[0] for branch in branches]
    for judge in judges:
        judge += "\nIs this step good or bad? It is " + rx.select("verdict", VERDICTS)
    figures = [judge.get_meta_info("verdict")["normalized_prompt_logprobs"] for judge in judges]
    return [good - bad for good, bad in figures]


def run(backend: rx.Backend, *, size: int = 1, hints: bool = True, width: int = 3, depth: int = 2) -> list[str]:
    """The steps and the answer for `size` problems."""
    problems = [f"{PROBLEM} (Version {index + 1})" for index in range(size)]
    batch = [{"problem": problem, "width": width, "depth": depth} for problem in problems]
    states = solve.run_batch(batch, backend=backend, hints=hints, seed=1)
    return [" | ".join(state.ret_value) for state in states]


if __name__ == "__main__":
    print("\n".join(run(rx.RuntimeEndpoint(sys.argv[1]))))
