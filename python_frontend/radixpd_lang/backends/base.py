"""What the interpreter asks of a backend: complete a prompt, whole or streamed, score choices, compute a prefix in advance.

All calls run on the package's event loop, many at a time. A backend raises `BackendError` for whatever it cannot do, bounds every wait
itself, and gives up a request whose task is cancelled. `name` is what the program calls the variable: for fakes and traces.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from radixpd_lang.choices import Scores
from radixpd_lang.sampling import Sampling
from radixpd_lang.transcript import Prompt
from radixpd_lang.values import Meta

__all__ = ["Backend", "Completion", "Delta"]


@dataclass(frozen=True, slots=True)
class Completion:
    """One text of the model. `meta` is shaped like radixpd's `meta_info`: finish_reason, prompt_tokens, cached_tokens ..."""

    text: str
    meta: Meta = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of a stream, and what is known about the whole by now."""

    text: str
    meta: Meta = field(default_factory=dict)


class Backend(Protocol):
    """A model behind a server."""

    async def generate(self, prompt: Prompt, sampling: Sampling, *, name: str | None) -> list[Completion]:
        """The completions of a prompt: one, or `sampling.n`."""
        ...

    def stream(self, prompt: Prompt, sampling: Sampling, *, name: str | None) -> AsyncGenerator[Delta, None]:
        """One completion, piece by piece."""
        ...

    async def score(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool, staged: bool, name: str | None) -> Scores:
        """Log-probabilities of the tokens of each choice after the prompt, and with `unconditional` also without it. `staged`, a hint:
        one choice goes ahead, and the others find the prompt in the cache."""
        ...

    async def warm(self, prompt: Prompt) -> None:
        """A hint: this will be the start of several prompts. A backend without a cache does nothing."""
        ...
