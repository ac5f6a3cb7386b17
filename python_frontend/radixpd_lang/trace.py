"""Programs without a model: what they would do, and what their first prompt is.

A trace is an ordinary run against `TraceBackend`, which answers at once with texts like `{answer}`, while the branches keep the nodes. The
first prompt of a program comes from a run that ends at its first request. Called by `program` and `batch`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from radixpd_lang.backends.base import Completion, Delta
from radixpd_lang.choices import Scores
from radixpd_lang.errors import BackendError
from radixpd_lang.ir import Commit, Gen, Node, RoleBegin, RoleEnd, Select, Text, Variable
from radixpd_lang.place import Place, place_of
from radixpd_lang.run import Options
from radixpd_lang.sampling import DTYPES, Sampling
from radixpd_lang.transcript import Prompt

if TYPE_CHECKING:
    from radixpd_lang.branch import Branch
    from radixpd_lang.program import Execution, Function

__all__ = ["Trace", "TraceBackend", "first_prompt", "placeholders"]

LONGEST = 60  # characters of a text that are shown


@dataclass(frozen=True, slots=True)
class Trace:
    """`nodes` in order; a tuple among them is a fork, and holds the trace of each branch. `ended`: the error of a program that could not
    be traced to its end, and where."""

    nodes: tuple[Node | tuple[Trace, ...], ...]
    ended: tuple[str, Place] | None = None

    @classmethod
    def of(cls, execution: Execution) -> Trace:
        """Run a prepared program and read its nodes."""
        ended = None
        try:
            execution.execute()
        except Exception as error:  # a program that cannot go on without answers has been traced as far as that
            ended = (f"{type(error).__name__}: {error}", place_of(error))
        return replace(_tree(execution.root), ended=ended)

    @property
    def variables(self) -> list[str]:
        """Names that the model would write or choose, also in branches."""
        return list(dict.fromkeys(node.name for node in self.walk() if isinstance(node, (Gen, Select)) and node.name is not None))

    def walk(self) -> Iterator[Node]:
        """Every node; those of branches where they fork."""
        for node in self.nodes:
            if isinstance(node, tuple):
                for branch in node:
                    yield from branch.walk()
            else:
                yield node

    def __str__(self) -> str:
        """An indented tree, one node a line."""
        return "\n".join(self._lines(0))

    def _lines(self, depth: int) -> Iterator[str]:
        for node in self.nodes:
            if isinstance(node, tuple):
                yield f"{'  ' * depth}fork {len(node)}"
                for index, branch in enumerate(node):
                    yield f"{'  ' * depth}  branch {index}"
                    yield from branch._lines(depth + 2)
                continue
            depth -= isinstance(node, RoleEnd)
            if line := _line(node):
                yield f"{'  ' * depth}{line}"
            depth += isinstance(node, RoleBegin)
        if self.ended is not None:
            yield f"{'  ' * depth}... {self.ended[0]} ({self.ended[1]})"


def _tree(branch: Branch) -> Trace:
    nodes = [tuple(_tree(child) for child in node) if isinstance(node, tuple) else node for node in branch.nodes]
    return Trace(tuple(nodes))


def _line(node: Node) -> str:
    match node:
        case Text():
            text = repr(node.text)
            return f"text {text if len(text) <= LONGEST else text[:LONGEST] + '...'}"
        case Gen():
            said = ", ".join(f"{name}={value!r}" for name, value in node.sampling.said().items())
            return f"gen {node.name or ''}({said})"
        case Select():
            return f"select {node.name or ''}({', '.join(map(repr, node.choices))})"
        case RoleBegin():
            return node.role
        case Variable():
            return f"variable {node.value.name or ''}"
        case Commit():
            return "commit"
        case RoleEnd():
            return ""


class TraceBackend:
    """Writes `{name}`, or what fits the dtype; chooses the first choice."""

    async def generate(self, prompt: Prompt, sampling: Sampling, *, name: str | None) -> list[Completion]:
        samples = {dtype.pattern: dtype.sample for dtype in DTYPES.values()}
        text = samples.get(sampling.regex or "", f"{{{name or 'gen'}}}")
        return [Completion(text)] * (sampling.n or 1)

    async def stream(self, prompt: Prompt, sampling: Sampling, *, name: str | None) -> AsyncGenerator[Delta, None]:
        for completion in await self.generate(prompt, sampling, name=name):
            yield Delta(completion.text)

    async def score(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool, staged: bool, name: str | None) -> Scores:
        rows = ((0.0,),) * len(choices)
        return Scores(rows, rows)

    async def warm(self, prompt: Prompt) -> None:
        pass


def placeholders(body: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, str]:
    """A text like `{question}` for each argument of a program that is needed and not given."""
    signature = inspect.signature(body)
    given = signature.bind_partial(None, *arguments, **keywords).arguments
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind not in kinds and p.name not in given]
    return {name: f"{{{name}}}" for name in needed}


class _Probe(TraceBackend):
    """Refuses everything, and remembers the first prompt."""

    def __init__(self) -> None:
        self.prompt: Prompt | None = None

    def _stop(self, prompt: Prompt) -> BackendError:
        self.prompt = self.prompt or prompt
        return BackendError("this run ends at its first request")

    async def generate(self, prompt: Prompt, sampling: Sampling, *, name: str | None) -> list[Completion]:
        raise self._stop(prompt)

    async def score(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool, staged: bool, name: str | None) -> Scores:
        raise self._stop(prompt)

    async def warm(self, prompt: Prompt) -> None:
        self._stop(prompt)


def first_prompt(program: Function, call: Mapping[str, Any], options: Options) -> Prompt | None:
    """The first prompt that a program would send, None if it sends none. Its code runs up to where it reads what the model wrote."""
    probe = _Probe()
    with contextlib.suppress(Exception):
        program.prepare(replace(options, backend=probe, stream=False, seed=None), (), call).execute()
    return probe.prompt
