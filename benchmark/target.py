"""What the benchmark asks the server before and after a run: its model, how much it takes, its tokenizer, an empty cache.

Plain blocking HTTP, never during a measurement. Whatever is refused or missing becomes a `ConfigError` that says which flag helps. Called
by `bench_serving`.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec

from radixpd.errors import ConfigError

__all__ = ["ServerTokenizer", "Target"]

DEADLINE = 120.0  # seconds for one call
MOST_TEXTS, MOST_CHARACTERS = 1024, 2**22  # of one call of /tokenize


class Target:
    """The server at `base_url`."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {api_key}"} if api_key else {})}

    def call(self, path: str, body: Any = None, *, method: str | None = None) -> Any:
        """One JSON answer; None where the server has no such route."""
        data = None if body is None else msgspec.json.encode(body)
        try:
            request = urllib.request.Request(self.base_url + path, data=data, headers=self._headers, method=method)
            with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
                return msgspec.json.decode(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            if error.code in (404, 405):
                return None
            words = error.read()[:300].decode(errors="replace")
            raise ConfigError(f"{self.base_url}{path} answered {error.code}: {words}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ConfigError(f"{self.base_url}{path}: no answer ({getattr(error, 'reason', None) or error}); see --base-url") from None

    @cached_property
    def card(self) -> dict[str, Any]:
        """The first entry of /v1/models; {} where there is none."""
        models = (self.call("/v1/models") or {}).get("data") or [{}]
        return dict(models[0])

    @property
    def model(self) -> str:
        """The name of the served model."""
        return str(self.card.get("id", "default"))

    @property
    def limit(self) -> int | None:
        """Tokens of prompt plus output that the server takes, where it tells."""
        limit = self.card.get("max_model_len")
        return limit if isinstance(limit, int) else None

    def flush_cache(self) -> None:
        """Empty the prefix cache of an idle server."""
        if self.call("/flush_cache", method="POST") is None:
            raise ConfigError(f"--flush-cache: {self.base_url} has no /flush_cache")


class ServerTokenizer:
    """The server's own tokenizer, over HTTP."""

    def __init__(self, target: Target, model: str) -> None:
        self._target = target
        self._model = model
        self.special_ids: frozenset[int] = frozenset()  # no route names them

    @cached_property
    def vocab_size(self) -> int:
        """From /get_model_info."""
        size = (self._target.call("/get_model_info") or {}).get("vocab_size")
        if not isinstance(size, int):
            raise ConfigError("the server does not tell the size of its vocabulary: give --tokenizer")
        return size

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids as for a plain prompt."""
        lists: list[list[int]] = []
        batch: list[str] = []
        for text in texts:
            if batch and (len(batch) == MOST_TEXTS or sum(map(len, batch)) + len(text) > MOST_CHARACTERS):
                lists += self._tokenize({"prompt": batch})
                batch = []
            batch.append(text)
        return lists + self._tokenize({"prompt": batch}) if batch else lists

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation, ready for the assistant's turn."""
        ids: list[int] = self._tokenize({"messages": list(messages), "add_generation_prompt": True})
        return ids

    def _tokenize(self, body: dict[str, Any]) -> Any:
        answer = self._target.call("/tokenize", {"model": self._model, **body})
        if not isinstance(answer, dict) or "tokens" not in answer:
            raise ConfigError(f"{self._target.base_url} has no /tokenize that takes lists: give --tokenizer")
        return answer["tokens"]
