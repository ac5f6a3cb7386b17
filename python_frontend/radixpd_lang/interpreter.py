"""What the nodes of a program do: to the text of one branch, and to the backend.

Every method runs on the event loop, one at a time for a branch, in the order in which the program asked (`branch` sees to that); a
method that raises ends the branch. Invariant: the feed holds what people see of the transcript, piece by piece.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from radixpd_lang.backends.base import Completion
from radixpd_lang.choices import ChoicesMethod, decide
from radixpd_lang.errors import BackendError, ProgramError
from radixpd_lang.ir import Commit, Gen, RoleBegin, RoleEnd, Select, Text, Variable
from radixpd_lang.run import Run
from radixpd_lang.sampling import Sampling
from radixpd_lang.transcript import Prompt, Transcript, common_prompt
from radixpd_lang.values import Feed, Meta, Value

__all__ = ["WORTH_WARMING", "Interpreter", "Mark"]

WORTH_WARMING = 64  # characters that the server has not seen; a hint about fewer costs more than it saves

log = logging.getLogger("radixpd_lang")


@dataclass(slots=True)
class Mark:
    """A place in the text of a branch, once its turn has come."""

    parts: int = 0


class Interpreter:
    """The text of one branch. `path`: the branch's number at each fork that led to it."""

    def __init__(self, run: Run, path: tuple[int, ...], feed: Feed) -> None:
        self._run = run
        self._path = path
        self._feed = feed
        self._transcript = Transcript()
        self._shown: list[str] = []
        self._generated = 0

    async def tell(self, node: Text | Variable | RoleBegin | RoleEnd | Commit) -> None:
        """A node without a value."""
        match node:
            case Text():
                self._show(self._transcript.append(node.text))
            case Variable():
                self._show(self._transcript.append(str(await node.value.arrive())))
            case RoleBegin():
                self._show(self._transcript.begin(node.role))
            case RoleEnd():
                self._show(self._transcript.end(node.role))
            case Commit():
                await self._warm()

    async def gen(self, node: Gen, value: Value) -> None:
        """Let the model write."""
        self._transcript.append("")  # is this a place for text at all?
        prompt, sampling = self._transcript.prompt(), self._sampling(node)
        if self._run.options.stream and sampling.n in (None, 1):
            done = [await self._stream(prompt, node.name, sampling, value)]
        else:
            done = await self._run.backend.generate(prompt, sampling, name=node.name)
            self._show(done[0].text, done[0].meta, value)
        self._grow(done[0].text)
        if sampling.n is None:
            value.finish(_read(node, done[0].text), done[0].meta)
        else:
            meta = {**done[0].meta, "samples": [completion.meta for completion in done]}
            value.finish([_read(node, completion.text) for completion in done], meta)

    async def select(self, node: Select, value: Value) -> None:
        """Let the model choose."""
        self._transcript.append("")
        prompt, staged = self._transcript.prompt(), self._run.options.hints
        bare = node.method is ChoicesMethod.UNCONDITIONAL_LIKELIHOOD_NORMALIZED
        scores = await self._run.backend.score(prompt, node.choices, unconditional=bare, staged=staged, name=node.name)
        decision = decide(node.method, scores)
        chosen = node.choices[decision.index]
        meta: Meta = {
            **(scores.details or {}),
            "choices": list(node.choices),
            "choices_method": node.method.value,
            "normalized_prompt_logprobs": list(decision.figures),
            "input_token_logprobs": [list(row) for row in scores.logprobs],
        }
        self._show(chosen, meta, value)
        self._grow(chosen)
        value.finish(chosen, meta)

    async def fork(self, count: int, origin: Value) -> None:
        """Let branches begin here."""
        if count > 1:
            await self._warm()
        origin.finish(self._transcript.copy())

    async def inherit(self, origin: Value) -> None:
        """Begin where another branch was."""
        self._transcript = (await origin.arrive()).copy()
        self._show(str(self._transcript.prompt()))

    async def gather(self, parts: Sequence[Value | None], value: Value) -> None:
        """Values of several branches as a list."""
        value.finish([None if part is None else await part.arrive() for part in parts])

    async def adopt(self, snapshot: Value, origin: Value) -> None:
        """Append what another branch has written since it began."""
        before, after = (await origin.arrive()).prompt(), await snapshot.arrive()
        if (len(before.messages), before.role) != (len(after.messages), after.role):
            raise ValueError("concate_and_append takes branches that stayed in the turn in which they began")
        self._show(self._transcript.append(after.text[len(before.text) :]))

    async def snapshot(self, value: Value) -> None:
        """The prompt as it is."""
        value.finish(self._transcript.prompt())

    async def mark(self, mark: Mark) -> None:
        """Remember how long the text is."""
        mark.parts = len(self._shown)

    async def since(self, mark: Mark, value: Value) -> None:
        """The text from there on."""
        value.finish("".join(self._shown[mark.parts :]))

    def _sampling(self, node: Gen) -> Sampling:
        sampling = node.sampling.over(self._run.options.sampling)
        seed = self._run.seed_of(self._path, self._generated)
        self._generated += 1
        return sampling if sampling.seed is not None or seed is None else replace(sampling, seed=seed)

    async def _stream(self, prompt: Prompt, name: str | None, sampling: Sampling, value: Value) -> Completion:
        parts: list[str] = []
        meta: Meta = {}
        async with aclosing(self._run.backend.stream(prompt, sampling, name=name)) as deltas:
            async for delta in deltas:
                parts.append(delta.text)
                meta = delta.meta or meta
                self._show(delta.text, delta.meta, value)
        return Completion("".join(parts), meta)

    async def _warm(self) -> None:
        """Let the server compute what it has not seen, before several prompts begin with it. A hint never fails a program."""
        prompt, options = self._transcript.prompt(), self._run.options
        known = max(self._transcript.known, common_prompt(prompt, options.warmed).size)
        if not options.hints or prompt.size - known < WORTH_WARMING:
            return
        try:
            await self._run.backend.warm(prompt)
        except BackendError as error:
            log.warning("a prefix was not computed in advance: %s", error)
        self._transcript.known = prompt.size

    def _grow(self, text: str) -> None:
        """Append what the model wrote: the server has seen all of it."""
        self._transcript.append(text)
        self._transcript.known = self._transcript.prompt().size

    def _show(self, text: str, meta: Meta | None = None, value: Value | None = None) -> None:
        self._shown.append(text)
        self._feed.push(text, meta)
        if value is not None:
            value.feed.push(text, meta)


def _read(node: Gen, text: str) -> object:
    """The value of a text."""
    if node.dtype is None:
        return text
    try:
        return node.dtype.read(text)
    except (ValueError, KeyError):
        raise ProgramError(f"gen {node.name or ''}: {text!r} does not fit its dtype", node.place) from None
