"""A progress bar for long batches, on standard error: prompts that are done, and the engine's output tokens a second.

Drawn by the thread that waits for the batch, never by the engine's loop. Called by `llm`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from radixpd.runtime.client import Client

__all__ = ["Progress"]

DELAY = 1.0  # seconds before a bar appears: short batches have none


class Progress:
    """`make` builds the bar (see tqdm's own); None: no bar."""

    def __init__(self, total: int, client: Client, make: Callable[..., Any] | None) -> None:
        self._done = 0  # prompts; raised by the engine's loop
        self._client = client
        self._began = time.monotonic()
        self._tokens = client.load.generated_tokens_total
        self._bar = make(total=total, desc="Prompts", unit="prompt", delay=DELAY, dynamic_ncols=True) if make else None

    def count(self, task: asyncio.Task[None]) -> None:
        """One more prompt is done, or given up."""
        self._done += not task.cancelled()

    def show(self) -> None:
        """Bring the bar up to date."""
        if self._bar is None:
            return
        tokens = self._client.load.generated_tokens_total - self._tokens
        rate = tokens / max(time.monotonic() - self._began, 1e-3)
        self._bar.set_postfix_str(f"{rate:.0f} output tokens/s", refresh=False)
        self._bar.update(self._done - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self.show()
            self._bar.close()
