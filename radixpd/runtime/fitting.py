"""Whether a prompt and its output fit this server: what is cut, and what is refused with both numbers.

A prompt that may be cut (`truncate_prompt_tokens`, `--allow-auto-truncate`) loses its beginning, since the output goes on from its end; a
first token that begins every text (bos) stays. Called by the tokenizer manager, which alone knows a prompt's length.
"""

from __future__ import annotations

import numpy as np

from radixpd.runtime.admission import Ask, Limits, too_long

__all__ = ["cut", "may_cut", "output_limit"]


def may_cut(ask: Ask, limits: Limits) -> bool:
    """Whether this prompt may be cut to what fits."""
    return limits.auto_truncate or ask.truncate is not None


def cut(prompt: np.ndarray, ask: Ask, limits: Limits, *, bos: int | None) -> np.ndarray:
    """The prompt as it is served."""
    keep = _kept(len(prompt), ask, limits)
    if keep >= len(prompt):
        return prompt
    if bos is not None and prompt[0] == bos and keep > 1:
        return np.concatenate([prompt[:1], prompt[len(prompt) - keep + 1 :]])
    return prompt[len(prompt) - keep :]


def output_limit(ask: Ask, prompt: int, limits: Limits) -> int:
    """Tokens that may be generated; a `BadRequest` when they do not fit."""
    asked = ask.params.max_new_tokens
    room = limits.longest - prompt
    if room >= 1 and _flexible(ask, limits):
        return min(asked, room)
    if asked <= room:
        return asked
    param = "text" if room < min(asked, 1) else "max_new_tokens"
    raise too_long(limits, prompt, 1 if ask.clamp else asked, param=ask.names.get(param, param))


def _flexible(ask: Ask, limits: Limits) -> bool:
    return ask.clamp or limits.auto_truncate


def _kept(prompt: int, ask: Ask, limits: Limits) -> int:
    """Prompt tokens to keep: all of them where they fit, else as many as leave room for the output."""
    if ask.truncate is not None and ask.truncate > 0:
        prompt = min(prompt, ask.truncate)
    if ask.truncate != -1 and not limits.auto_truncate:
        return prompt
    asked, flexible = ask.params.max_new_tokens, _flexible(ask, limits)
    if prompt + (min(asked, 1) if flexible else asked) <= limits.longest:
        return prompt
    # A limit that nobody insists on (it may be the whole context) claims a quarter of the room at most.
    wanted = min(asked, max(1, limits.longest // 4)) if flexible else asked
    room = limits.longest - wanted
    return room if room >= 1 else prompt
