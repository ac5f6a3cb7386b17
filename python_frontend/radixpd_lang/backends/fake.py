"""A backend without a model, for tests of programs: answers come from the test, every call is kept.

Answers and scores are looked up when they are asked for, so the same program gives the same variables every time. Called by tests.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from radixpd_lang.backends.base import Completion, Delta
from radixpd_lang.choices import Scores
from radixpd_lang.sampling import DTYPES, Sampling
from radixpd_lang.transcript import Prompt

__all__ = ["Answer", "Call", "Fake"]

Answer = str | Callable[[Prompt, Sampling], "str | Awaitable[str]"]

PIECE = 4  # characters of a streamed piece


@dataclass(frozen=True, slots=True)
class Call:
    """What the backend was asked. `kind`: generate, stream, score or warm."""

    kind: str
    prompt: Prompt
    name: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    choices: tuple[str, ...] = ()


class Fake:
    """`Fake({"answer": "Paris", "poem": lambda prompt, sampling: ...})`.

    `answers`: by variable, a text, a function of prompt and sampling parameters (plain or async), or a list of these, one for each call
    in turn. A variable without an answer gets what fits its dtype, or its name in brackets. `scores`: a function of the prompt's text
    (None: without a prompt) and a choice that gives the log-probabilities of its tokens; without it the first choice wins.
    """

    def __init__(
        self,
        answers: Mapping[str, Answer | Sequence[Answer]] | None = None,
        scores: Callable[[str | None, str], Sequence[float]] | None = None,
    ) -> None:
        self.calls: list[Call] = []
        self._answers = {name: [each] if isinstance(each, str) or callable(each) else list(each) for name, each in (answers or {}).items()}
        self._scores = scores or (lambda prompt, choice: [0.0])
        self._turns: dict[str, int] = {}

    def prompts(self, kind: str = "generate") -> list[str]:
        """The prompts of all calls of a kind, as text."""
        return [str(call.prompt) for call in self.calls if call.kind == kind]

    async def generate(self, prompt: Prompt, sampling: Sampling, *, name: str | None) -> list[Completion]:
        """The next answers for this variable."""
        self.calls.append(Call("generate", prompt, name, sampling))
        return [await self._completion(prompt, sampling, name) for _ in range(sampling.n or 1)]

    async def stream(self, prompt: Prompt, sampling: Sampling, *, name: str | None) -> AsyncGenerator[Delta, None]:
        """The next answer, a few characters at a time."""
        self.calls.append(Call("stream", prompt, name, sampling))
        whole = await self._completion(prompt, sampling, name)
        for start in range(0, len(whole.text), PIECE):
            yield Delta(whole.text[start : start + PIECE])
        yield Delta("", whole.meta)

    async def score(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool, staged: bool, name: str | None) -> Scores:
        """The scores of the test's function."""
        self.calls.append(Call("score", prompt, name, choices=tuple(choices)))
        given = tuple(tuple(self._scores(str(prompt), choice)) for choice in choices)
        return Scores(given, tuple(tuple(self._scores(None, choice)) for choice in choices) if unconditional else None)

    async def warm(self, prompt: Prompt) -> None:
        """Only kept."""
        self.calls.append(Call("warm", prompt))

    async def _completion(self, prompt: Prompt, sampling: Sampling, name: str | None) -> Completion:
        text = self._next(prompt, sampling, name)
        if inspect.isawaitable(text):
            text = await text
        meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": len(str(prompt)), "completion_tokens": len(text)}
        return Completion(text, meta)

    def _next(self, prompt: Prompt, sampling: Sampling, name: str | None) -> str | Awaitable[str]:
        answers = self._answers.get(name or "")
        if not answers:
            samples = {dtype.pattern: dtype.sample for dtype in DTYPES.values()}
            return samples.get(sampling.regex or "", f"[{name or 'gen'}]")
        turn = self._turns[name or ""] = self._turns.get(name or "", -1) + 1
        answer = answers[turn % len(answers)]
        return answer if isinstance(answer, str) else answer(prompt, sampling)
