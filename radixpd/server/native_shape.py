"""The native answer: text, output_ids and `meta_info`, from one output.

Log-probabilities are `[logprob, id, text]` triples (`text` null unless asked for); the first prompt token has no log-probability, so its
is null. Values are finite: nothing goes below -9999. Called by the `/generate` route, plain and streamed.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import numpy as np

from radixpd.core.request import Finish, LogprobParams
from radixpd.core.step import TokenLogprobs
from radixpd.runtime.caller import caller
from radixpd.runtime.output import Output
from radixpd.text.tokenizer import Tokenizer

__all__ = ["LOWEST", "NativeShape", "finish_reason", "finite", "prompt_scores"]

LOWEST = -9999.0

Triple = list[Any]


def finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(float(logprob), LOWEST)


def finish_reason(finish: Finish | None, completion: int) -> dict[str, Any] | None:
    """`meta_info.finish_reason`."""
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": completion}
    return {"type": "abort", "message": finish.message, "status_code": finish.status}


def prompt_scores(output: Output) -> dict[int, tuple[float, np.ndarray, np.ndarray, np.ndarray]]:
    """Prompt position -> (logprob, top ids, top logprobs, logprobs of the ids asked for)."""
    return {
        scores.first + index: (float(scores.logprobs[index]), scores.top_ids[index], scores.top_logprobs[index], scores.asked[index])
        for scores in output.scores
        for index in range(len(scores.logprobs))
    }


class NativeShape:
    """How the outputs of one prompt look; `first` is its sample 0, which carries the prompt's scores."""

    def __init__(self, tokenizer: Tokenizer, first: Output, *, wish: LogprobParams | None, texts: bool, prompt_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._first = first
        self._wish = wish
        self._texts = texts
        self._prompt_ids = prompt_ids
        self._prompt: dict[str, Any] | None = None

    def answer(
        self, output: Output, *, upto: int, text: str, finish: Finish | None, start: int = 0, with_prompt: bool = True
    ) -> dict[str, Any]:
        """An answer: ids `[start, upto)`, `text`, and the end if it has come."""
        meta: dict[str, Any] = {
            "id": caller().shown(output.rid),
            "finish_reason": finish_reason(finish, upto),
            "prompt_tokens": len(output.prompt),
            "completion_tokens": upto,
            "cached_tokens": output.cached,
            "e2e_latency": time.monotonic() - output.arrived,
        }
        if finish is not None and output.journey is not None:
            meta["kv_journey"] = asdict(output.journey)
        if self._wish is not None:
            if with_prompt:
                meta |= self._prompt_fields(self._wish)
            meta |= self._output_fields(output, self._wish, start, upto)
        answer: dict[str, Any] = {"text": text, "output_ids": output.ids[start:upto], "meta_info": meta}
        if self._prompt_ids and with_prompt:
            answer["prompt_token_ids"] = output.prompt.tolist()
        return answer

    def _triple(self, logprob: float | None, token: int) -> Triple:
        return [None if logprob is None else finite(logprob), token, self._tokenizer.token_text(token) if self._texts else None]

    def _triples(self, ids: Any, logprobs: np.ndarray) -> list[Triple]:
        return [self._triple(logprob, int(token)) for token, logprob in zip(ids, logprobs.tolist())]

    def _prompt_fields(self, wish: LogprobParams) -> dict[str, Any]:
        if self._prompt is None:
            self._prompt = self._build_prompt_fields(wish)
        return self._prompt

    def _build_prompt_fields(self, wish: LogprobParams) -> dict[str, Any]:
        tokens: list[Triple] = []
        top: list[list[Triple] | None] = []
        asked: list[list[Triple] | None] = []
        if wish.start >= 0:
            scores = prompt_scores(self._first)
            for position, token in enumerate(self._first.prompt[wish.start :].tolist(), start=wish.start):
                found = scores.get(position)
                tokens.append(self._triple(found[0] if found else None, token))
                top.append(self._triples(found[1], found[2]) if found else None)
                asked.append(self._triples(wish.token_ids, found[3]) if found else None)
        return _fields("input", wish, tokens=tokens, top=top, asked=asked)

    def _output_fields(self, output: Output, wish: LogprobParams, start: int, upto: int) -> dict[str, Any]:
        entries: list[TokenLogprobs | None] = output.logprobs[start:upto]
        return _fields(
            "output",
            wish,
            tokens=[self._triple(entry.logprob if entry else None, token) for entry, token in zip(entries, output.ids[start:upto])],
            top=[self._triples(entry.top_ids, entry.top_logprobs) if entry else None for entry in entries],
            asked=[self._triples(wish.token_ids, entry.asked) if entry else None for entry in entries],
        )


def _fields(side: str, wish: LogprobParams, *, tokens: list[Triple], top: list[Any], asked: list[Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {f"{side}_token_logprobs": tokens}
    if wish.top:
        fields[f"{side}_top_logprobs"] = top
    if wish.token_ids:
        fields[f"{side}_token_ids_logprobs"] = asked
    return fields
