"""One request as the client saw it, and the latencies that follow from its times. Every definition of a latency is in this file.

Times are seconds on the client's clock since the start of the run: `due` (the schedule wants it sent), `started` (the client came to it),
`sent` (it had a free place and went out), one entry of `times` for each streamed chunk that carries output, `end` (the answer was
complete, or failed). Invariant: due <= started <= sent <= times[0] <= ... <= end. Filled by `client`, read by `figures`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Failure", "Record"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no complete answer: a `kind` to count by, and the words of one case."""

    kind: str
    detail: str = ""


@dataclass(slots=True)
class Record:
    """`counts[i]`: output tokens that came with the chunk at `times[i]`. `cached_tokens` is None where the server does not tell."""

    session: int | None = None
    turn: int = 0
    planned_input: int = 0
    asked_output: int = 0
    due: float = 0.0
    started: float = 0.0
    sent: float = 0.0
    end: float = 0.0
    streamed: bool = True
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    counted_by_server: bool = True
    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    failure: Failure | None = None

    @property
    def lag(self) -> float:
        """How late the client itself was."""
        return self.started - self.due

    @property
    def held(self) -> float:
        """How long --max-concurrency held the request back."""
        return self.sent - self.started

    @property
    def e2e(self) -> float:
        """From sending to the complete answer."""
        return self.end - self.sent

    @property
    def ttft(self) -> float | None:
        """From sending to the first chunk with output; an answer without visible output counts as a whole. None: not streamed."""
        if not self.streamed:
            return None
        return (self.times[0] if self.times else self.end) - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean time of an output token after the first. None: not streamed, or one token."""
        if not self.streamed or self.completion_tokens < 2 or not self.times:
            return None
        return (self.end - self.times[0]) / (self.completion_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """One value for each token after the first chunk: the time since the chunk before, shared by the tokens of the chunk."""
        values: list[float] = []
        for before, now, count in zip(self.times, self.times[1:], self.counts[1:]):
            values += [(now - before) / count] * count
        return values
