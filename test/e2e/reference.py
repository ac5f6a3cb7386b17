"""What a request answers when it runs alone, and how another run of it may differ.

Equality is exact, with one honest excuse: at the first token that differs, the reference's two best candidates were closer than
`NEAR` (then rounding decides, and what follows is another text). The excuse needs the reference's own log-probabilities, so it exists only
for greedy requests whose logits are not changed by penalties; everything else must be equal. Used by the equality tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from e2e.servers import ASCII_IDS, Server

__all__ = ["NEAR", "Reference", "answers", "solo"]

NEAR = 1e-3
TOLERANCE = 2e-3  # of a log-probability between two runs


@dataclass(frozen=True)
class Reference:
    """One output. `gaps[i]`: distance of the two best candidates for token i; empty where no excuse exists."""

    ids: list[int]
    text: str
    finish: dict[str, Any]
    logprobs: list[float]
    prompt_logprobs: list[float | None]
    gaps: list[float]

    def check(self, found: dict[str, Any], *, prefix: bool = False) -> bool:
        """Assert that `found` is this output (with `prefix`: a beginning of it). True if it needed the excuse."""
        ids = found["output_ids"]
        length = len(ids) if prefix else max(len(ids), len(self.ids))
        differ = next((i for i in range(length) if ids[i : i + 1] != self.ids[i : i + 1]), None)
        self._check_scores(found["meta_info"], len(ids) if differ is None else differ)
        if differ is None:
            assert self.text.startswith(found["text"].rstrip("\ufffd")) if prefix else found["text"] == self.text
            if not prefix:
                assert found["meta_info"]["finish_reason"] == self.finish
            return False
        assert differ < len(self.gaps), f"token {differ}: {ids[differ : differ + 5]} instead of {self.ids[differ : differ + 5]}"
        assert self.gaps[differ] < NEAR, f"token {differ} differs though the best two were {self.gaps[differ]} apart"
        return True

    def _check_scores(self, meta: dict[str, Any], equal: int) -> None:
        found = meta.get("output_token_logprobs")
        if found is not None:
            assert len(found) == meta["completion_tokens"]
            for (logprob, _, _), expected in zip(found[:equal], self.logprobs):
                assert abs(logprob - expected) < TOLERANCE
        prompt = meta.get("input_token_logprobs")
        if prompt:
            assert len(prompt) == len(self.prompt_logprobs)
            for (logprob, _, _), expected in zip(prompt, self.prompt_logprobs):
                assert (logprob is None) == (expected is None)
                assert logprob is None or abs(logprob - expected) < TOLERANCE


def answers(answer: Any) -> list[dict[str, Any]]:
    """One answer, or the list of them, as a list."""
    return answer if isinstance(answer, list) else [answer]


def solo(server: Server, body: dict[str, Any]) -> list[Reference]:
    """The outputs of a `/generate` body that runs alone, without a cache hit."""
    server.flush()
    sampling = body["sampling_params"]
    biased = "logit_bias" in sampling
    wish: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2}
    if biased:
        wish["token_ids_logprob"] = ASCII_IDS
    greedy = sampling.get("temperature") == 0 and not any("penalty" in name for name in sampling)
    found = answers(server.generate(**{**body, **wish}))
    return [_reference(item, "output_token_ids_logprobs" if biased else "output_top_logprobs", greedy=greedy) for item in found]


def _reference(found: dict[str, Any], field: str, *, greedy: bool) -> Reference:
    meta = found["meta_info"]
    best = [sorted((logprob for logprob, _, _ in candidates), reverse=True)[:2] for candidates in meta[field]]
    return Reference(
        ids=found["output_ids"],
        text=found["text"],
        finish=meta["finish_reason"],
        logprobs=[logprob for logprob, _, _ in meta["output_token_logprobs"]],
        prompt_logprobs=[logprob for logprob, _, _ in meta["input_token_logprobs"]],
        gaps=[first - second for first, second in best] if greedy else [],
    )
