"""Log-probabilities for clients: of sampled tokens and of prompt tokens.

They are `log_softmax` of the model's *raw* logits in float32, before bias, penalties and temperature: they describe the model, not the
request. Prompt scores are computed in blocks of rows, because prompt times vocabulary would not fit in memory. Called by `Runner.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from radixpd.core.request import LogprobParams
from radixpd.core.step import PromptScores, TokenLogprobs

__all__ = ["score_prompt", "token_logprobs"]

BLOCK_FLOATS = 1 << 24  # logits of one block: 64 MiB


def token_logprobs(
    logits: torch.Tensor, *, which: np.ndarray, tokens: np.ndarray, wanted: Sequence[LogprobParams | None]
) -> tuple[TokenLogprobs | None, ...]:
    """Entry i describes `tokens[i]` under row `which[i]` of `logits [U, vocab]`, or is None; empty when nobody asks."""
    if all(params is None for params in wanted):
        return ()
    return tuple(
        None if params is None else one_token(logits[row], token, params)
        for row, token, params in zip(which.tolist(), tokens.tolist(), wanted, strict=True)
    )


def one_token(logits: torch.Tensor, token: int, params: LogprobParams) -> TokenLogprobs:
    """Log-probabilities at one position, from its logits `[vocab]`."""
    logprobs = torch.log_softmax(logits, dim=-1)
    top_ids, top = likeliest(logprobs, params.top)
    return TokenLogprobs(float(logprobs[token]), top_ids, top, asked_for(logprobs, params))


def score_prompt(
    hidden: torch.Tensor,
    targets: np.ndarray,
    *,
    first: int,
    params: LogprobParams,
    logits: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> PromptScores:
    """Score `targets [k]`, each from the hidden state `[k, hidden]` before it; `first` is the position of the first target."""
    size = max(1, BLOCK_FLOATS // vocab_size)
    blocks = [
        score_block(torch.log_softmax(logits(hidden[start : start + size]), dim=-1), targets[start : start + size], params)
        for start in range(0, len(targets), size)
    ]
    if not blocks:
        blocks = [score_block(torch.empty(0, vocab_size), targets, params)]
    scores, top_ids, top, asked = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return PromptScores(first, scores, top_ids, top, asked)


def score_block(
    logprobs: torch.Tensor, targets: np.ndarray, params: LogprobParams
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Scores of `targets [k]`, their alternatives and the ids asked for, from `logprobs [k, vocab]`."""
    scores = logprobs.gather(-1, torch.from_numpy(targets.astype(np.int64))[:, None])[:, 0].numpy()
    return (scores, *likeliest(logprobs, params.top), asked_for(logprobs, params))


def likeliest(logprobs: torch.Tensor, top: int) -> tuple[np.ndarray, np.ndarray]:
    """The `top` best ids (int32) and their log-probabilities along the last axis, best first."""
    values, ids = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    return ids.to(torch.int32).numpy(), values.numpy()


def asked_for(logprobs: torch.Tensor, params: LogprobParams) -> np.ndarray:
    """Log-probabilities of the ids that the client named, along the last axis."""
    return logprobs[..., list(params.token_ids)].numpy()
