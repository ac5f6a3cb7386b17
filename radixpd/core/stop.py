"""Rules on token ids and counts that end a request. Stop strings are the detokenizer's (`text/`), which sends `Stop`.

Called by the scheduler on each applied step: `ended` for the whole batch at once, `finish_of` for the few rows that it names.
"""

from __future__ import annotations

import numpy as np

from radixpd.core.request import Finish, Request
from radixpd.core.slots import SlotTable

__all__ = ["ended", "finish_of"]


def ended(table: SlotTable, slots: np.ndarray, ids: np.ndarray, eos_ids: np.ndarray) -> np.ndarray:
    """Which rows may have ended with their newest token `ids` (already counted in `known`): bool `[len(slots)]`.

    Rows with rules of their own (`picky`) are always named; `finish_of` decides.
    """
    eos = (ids[:, None] == eos_ids).any(axis=1) & ~table.ignores_eos[slots]
    full = table.known[slots] >= table.limit[slots]
    result: np.ndarray = eos | full | table.picky[slots]
    return result


def finish_of(request: Request, known: int, token: int, eos_ids: np.ndarray) -> Finish | None:
    """Why the request ends with `token` as its last of `known` tokens; None when it goes on."""
    params = request.params
    if params.grammar is not None and token in eos_ids:  # behind a complete text there is nothing else
        return Finish("stop", matched=token)
    if known - request.prompt_length >= params.min_new_tokens:
        if token in params.stop_token_ids:
            return Finish("stop", matched=token)
        if not params.ignore_eos and token in eos_ids:
            return Finish("stop", matched=token)
    return Finish("length") if known >= request.length_limit else None
