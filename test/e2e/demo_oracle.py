"""What transformers says about the demo model: greedy continuations and logits, in float32, each computed once.

`Oracle.check` is the rule for equality: same ids, but where the reference's own best logits lie closer than `TIE` either choice is right,
and the reference then goes on from the choice that was made. Loading transformers takes seconds, so that happens on first use.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from radixpd.text.tokenizer_config import eos_ids_of_model

__all__ = ["TIE", "Oracle"]

TIE = 1e-3


class Oracle:
    """A reference model, loaded from the converted directory."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
        # Unset fields of a generation config are taken from the model's own: it must not bring any.
        self._model.generation_config = GenerationConfig()
        self._eos = list(eos_ids_of_model(directory))
        self._known: dict[tuple[tuple[int, ...], int, bool], list[int]] = {}
        self.ties = 0

    def greedy(self, prompt: list[int], tokens: int, *, free: bool) -> list[int]:
        """The first `tokens` ids; with `free`, an end of sequence ends them and is the last one."""
        key = (tuple(prompt), tokens, free)
        if key not in self._known:
            options = GenerationConfig(
                do_sample=False, max_new_tokens=tokens, eos_token_id=self._eos if free else None, pad_token_id=self._eos[0]
            )
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                out = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
            self._known[key] = out[0, len(prompt) :].tolist()
        return self._known[key]

    def check(self, prompt: list[int], ours: list[int], tokens: int, *, free: bool) -> None:
        """`ours` is a greedy continuation of `prompt` of at most `tokens` ids."""
        expected = self.greedy(prompt, tokens, free=free)
        done = 0
        while ours[done:] != expected:
            same = next((i for i, (a, b) in enumerate(zip(ours[done:], expected)) if a != b), None)
            assert same is not None, f"{len(ours)} ids instead of {done + len(expected)}: {ours}"
            at = done + same
            gap = self.gap(prompt + ours[:at], ours[at])
            assert gap < TIE, f"id {at} is {ours[at]}, not {expected[same]}; it lies {gap:.4f} below the reference's best logit: {ours}"
            self.ties += 1
            done = at + 1
            ended = free and ours[at] in self._eos
            expected = [] if ended or done == tokens else self.greedy(prompt + ours[:done], tokens - done, free=free)

    def gap(self, context: list[int], token: int) -> float:
        """How far the logit of `token` lies below the best one after `context`."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([context]), logits_to_keep=1).logits[0, -1]
        return float(logits.max() - logits[token])
