"""The request log: one line when a request is taken, one when each of its outputs has ended, one when a request is refused.

Levels as SGLang's: 0 metadata, 1 also sampling parameters and the words of refusals, 2 also the beginning of input and output, 3 all of
them. The lines go to standard error whatever `--log-level` says. Invariants: salts and keys are never in a line, and a request that asked
for `no_logs` has none. Called by the tokenizer manager, by outputs when they end, and by the HTTP layer; `/configure_logging` changes it
while the server runs.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from typing import Any

import numpy as np

from radixpd.config.settings import ObserveSettings
from radixpd.core.request import SamplingParams
from radixpd.runtime.caller import caller
from radixpd.runtime.logs import formatter
from radixpd.runtime.output import Output

__all__ = ["RequestLog", "changed_params"]

SHOWN_CHARACTERS = 2048  # of a text at level 2
SHOWN_IDS = 256
PROCESS = "api"


class RequestLog:
    """Writes when `enabled`."""

    def __init__(self, settings: ObserveSettings | None = None) -> None:
        settings = settings or ObserveSettings()
        self.enabled = settings.log_requests
        self.level = settings.log_requests_level
        self.format = "json" if "json" in (settings.log_format, settings.log_requests_format) else "text"
        self._open()

    def configure(self, *, enabled: bool | None = None, level: int | None = None, format: str | None = None) -> None:
        """Change what is given."""
        self.enabled = self.enabled if enabled is None else enabled
        self.level = self.level if level is None else level
        self.format = format or self.format
        self._open()

    def received(self, outputs: tuple[Output, ...], prompt: str | np.ndarray) -> None:
        """The samples of one prompt were sent to the scheduler. `prompt` is what the client gave: text or ids."""
        if not self.enabled:
            return
        first = outputs[0]
        fields: dict[str, Any] = {"rid": first.group, "prompt_tokens": len(first.prompt), "samples": len(outputs)}
        if (given := caller().request_id) and given != first.group:
            fields["request_id"] = given
        if first.priority:
            fields["priority"] = first.priority
        if first.salted:
            fields["salted"] = True
        if self.level >= 1:
            fields["sampling_params"] = changed_params(first.params)
        if self.level >= 2:
            fields["input"] = self._cut(prompt)
        self._write("request.received", fields)

    def ended(self, output: Output) -> None:
        """An output has its finish."""
        finish = output.finish
        if not self.enabled or finish is None:
            return
        fields: dict[str, Any] = {
            "rid": output.rid,
            "prompt_tokens": len(output.prompt),
            "cached_tokens": output.cached,
            "completion_tokens": len(output.ids),
            "finish": finish.kind,
            "e2e_seconds": _rounded(output.ended - output.arrived),
        }
        if output.queued is not None:
            fields["queue_seconds"] = _rounded(output.queued)
        if output.first:
            fields["ttft_seconds"] = _rounded(output.first - output.arrived)
        if finish.kind == "abort":
            fields["status"] = finish.status
            fields["reason"] = finish.message
        if self.level >= 2:
            fields["output"] = self._cut(output.text)
        self._write("request.finished", fields)

    def refused(self, *, route: str, method: str, client: str, request_id: str, status: int, error: dict[str, Any]) -> None:
        """An HTTP request was answered with an error. `error` is the body's; `request_id` is what the answer's header calls it."""
        if not self.enabled:
            return
        fields = {
            "route": route,
            "method": method,
            "client": client,
            "request_id": request_id,
            "status": status,
            "code": error.get("code"),
            "param": error.get("param"),
        }
        if self.level >= 1:
            fields["reason"] = self._cut(str(error.get("message", "")))
        self._write("request.refused", {name: value for name, value in fields.items() if value is not None})

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        self._logger.info(event, extra={"fields": fields})

    def _cut(self, content: str | np.ndarray) -> str | list[int]:
        most = SHOWN_CHARACTERS if isinstance(content, str) else SHOWN_IDS
        shown = content if self.level >= 3 or len(content) <= most else content[:most]
        return shown if isinstance(shown, str) else [int(token) for token in shown]

    def _open(self) -> None:
        """A logger of its own, outside the tree: the lines were asked for by name, so `--log-level` does not take them away."""
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(formatter(PROCESS, self.format))
        self._logger = logging.Logger("radixpd.requests", logging.INFO)
        self._logger.addHandler(handler)


def changed_params(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters that differ from the defaults."""
    default = dataclasses.asdict(SamplingParams())
    return {name: value for name, value in dataclasses.asdict(params).items() if value != default[name]}


def _rounded(seconds: float) -> float:
    return round(seconds, 4)
