"""Grammars of the slots of one runner: a guide for each constrained slot, and the masks of the next sample.

Masks are filled by a thread of its own while the forward runs. Invariant: a slot's guide has seen exactly the output tokens that its slot
holds, so a request goes on after a retraction, on a decode server, and in a fork. What a guide cannot do ends its request by a fault, never
the step. Called by `Runner`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from radixpd.core.request import Grammar
from radixpd.core.step import Fault, Forced, SlotBegin
from radixpd.grammar.base import mask_words
from radixpd.grammar.errors import GrammarError
from radixpd.grammar.jump import Guide

__all__ = ["Constraints"]

MOST_FORCED = 256  # tokens at a time: a step should not grow beyond what others wait for


class Constraints:
    """`open_guide`: an output of a grammar that is ready; `jump`: forced tokens are taken at once."""

    def __init__(self, *, vocab_size: int, open_guide: Callable[[Grammar], Guide], jump: bool = False) -> None:
        self._jump = jump
        self._ends: dict[int, int] = {}  # where the output of a slot that may jump ends at the latest
        self._words = mask_words(vocab_size)
        self._open = open_guide
        self._guides: dict[int, Guide] = {}
        self._broken: dict[int, str] = {}  # slots whose request is to end
        self._filling: Future[dict[int, np.ndarray]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def begin(self, begin: SlotBegin) -> None:
        """Forget the slot's last output; the new one may have tokens already."""
        slot, grammar = begin.slot, begin.params.grammar
        self._guides.pop(slot, None)
        self._broken.pop(slot, None)
        self._ends.pop(slot, None)
        if grammar is None:
            return
        try:
            guide = self._open(grammar)
            guide.replay(begin.tokens[begin.prompt_length :].tolist())
            self._guides[slot] = guide
            if self._jump and begin.params.may_jump:
                self._ends[slot] = begin.prompt_length + begin.params.max_new_tokens
        except GrammarError as error:
            self._broken[slot] = str(error)

    def start(self, slots: Iterable[int]) -> None:
        """These slots will be sampled: fill their masks meanwhile."""
        if self._guides:
            constrained = [slot for slot in slots if slot in self._guides]
            self._filling = self._thread.submit(self._fill, constrained) if constrained else None

    def masks(self) -> dict[int, np.ndarray]:
        """What `start` has begun: int32 `[words]` for each constrained slot, bit t for token t. A slot whose output has ended has none."""
        filling, self._filling = self._filling, None
        return filling.result() if filling is not None else {}

    def accept(self, slots: np.ndarray, tokens: np.ndarray) -> tuple[Fault, ...]:
        """These tokens were sampled for these slots; whose request must end."""
        if not self._guides and not self._broken:
            return ()
        faults = []
        for index, (slot, token) in enumerate(zip(slots.tolist(), tokens.tolist(), strict=True)):
            guide = self._guides.get(slot)
            # A step after the end of sequence is one that was planned before it was seen.
            if slot not in self._broken and guide is not None and not guide.ended:
                self._accept(slot, guide, token)
            if slot in self._broken:
                faults.append(Fault(index, f"the output cannot follow its grammar: {self._broken[slot]}"))
        return tuple(faults)

    def jump(self, slots: np.ndarray, positions: np.ndarray) -> tuple[Forced, ...]:
        """What must follow the tokens just accepted at these positions."""
        found = []
        for index, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            if slot in self._ends and slot not in self._broken and not (guide := self._guides[slot]).ended:
                try:
                    tokens = guide.take_forced(min(MOST_FORCED, self._ends[slot] - position - 1))
                except GrammarError as error:
                    self._broken[slot] = str(error)
                    continue
                if tokens:
                    found.append(Forced(index, np.array(tokens, dtype=np.int32)))
        return tuple(found)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _accept(self, slot: int, guide: Guide, token: int) -> None:
        try:
            guide.accept(token)
        except GrammarError as error:
            self._broken[slot] = str(error)

    def _fill(self, slots: list[int]) -> dict[int, np.ndarray]:
        filled: dict[int, np.ndarray] = {}
        for slot in slots:
            guide = self._guides[slot]
            if guide.ended:
                continue
            row = np.zeros(self._words, dtype=np.int32)
            try:
                guide.mask(row)
                filled[slot] = row
            except (GrammarError, RuntimeError) as error:
                self._broken[slot] = str(error)[:200]
        return filled
