"""What a server does with a request before and after its prompt is computed. One small object per role on the same scheduler loop.

`Aggregated` serves a request from prompt to last token. Prefill and decode roles of a disaggregated group implement the same protocol.
"""

from __future__ import annotations

import enum
from typing import Protocol

from radixpd.core.request import Phase, Request

__all__ = ["Aggregated", "Next", "Role"]


class Next(enum.Enum):
    """Where a request goes once its whole prompt is planned."""

    DECODE = "decode"
    SEND = "send"


class Role(Protocol):
    """The scheduler asks; the role decides and never touches pages itself."""

    def arrive(self, request: Request, now: float) -> Phase:
        """Where a new request starts: WAITING, or PARKED until the role releases it."""
        ...

    def on_computed(self, request: Request, first: int, end: int) -> None:
        """The KV of positions `first .. end - 1` of the prompt exists now."""
        ...

    def on_prompt_done(self, request: Request) -> Next:
        """The plan that completes the prompt is made."""
        ...

    def tick(self, now: float) -> None:
        """Time has passed: deadlines."""
        ...


class Aggregated:
    """Prefill and decode in one place."""

    def arrive(self, request: Request, now: float) -> Phase:
        """Every request may run at once."""
        return Phase.WAITING

    def on_computed(self, request: Request, first: int, end: int) -> None:
        """Nobody else is interested."""

    def on_prompt_done(self, request: Request) -> Next:
        """Decode here."""
        return Next.DECODE

    def tick(self, now: float) -> None:
        """Nothing waits for a peer."""
