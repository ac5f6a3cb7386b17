"""`LLM`: the engine inside a program, without HTTP. The same processes, admission and tokenizer manager as a server, the same answers.

    from radixpd.llm import LLM
    with LLM(model_path="demo") as llm:
        print(llm.generate("The capital of France is", {"temperature": 0})["text"])

Calls come from any thread, inside or outside of a running event loop; all work runs on the loop of `Embedded`. Invariants: nothing of a
call starts before every prompt of it has passed every check; however many prompts a call has, a bounded number of them is in the engine;
a call that is given up leaves nothing running. docs/offline.md is the manual.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from radixpd import __version__
from radixpd.config.cli import from_keywords
from radixpd.config.resolve import public_view
from radixpd.config.settings import DisaggregationSettings, ServerSettings
from radixpd.core.scheduler import PAUSE_MODES
from radixpd.errors import BadRequest, ConfigError, EngineFailed
from radixpd.launch_server import ENTRIES
from radixpd.offline.progress import Progress
from radixpd.runtime.embedded import Embedded
from radixpd.runtime.private_folder import PrivateFolder
from radixpd.runtime.supervisor import decide

if TYPE_CHECKING:
    from radixpd.offline.batch import Batch, Messages, Prompts

__all__ = ["LLM"]

# What only a server does. `max_queued_requests`: here a call hands over as many prompts as the engine can use.
SERVER_ONLY = (
    frozenset(f.name for f in (*fields(ServerSettings), *fields(DisaggregationSettings))) - {"watchdog_timeout"}
    | {"enable_cache_report", "enable_metrics", "collect_tokens_histogram", "crash_dump_folder", "profile_folder", "max_queued_requests"}
)  # fmt: skip
PAUSE_SECONDS = 60.0  # for the steps in flight

Answer = dict[str, Any]
Sampling = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


class LLM:
    """One model, ready when the constructor returns. `settings` are the server's flags, with underscores.

    Sampling parameters and options have the names, ranges and defaults of `/generate` (docs/api.md); so have the answers. Wrong settings
    are a `ConfigError`, wrong prompts a `BadRequest`; once the engine is gone every call raises `EngineFailed`.
    """

    def __init__(self, model_path: str | None = None, **settings: Any) -> None:
        _refuse_strangers(settings)
        resolved = decide(from_keywords({"log_level": "warning", **settings, "model_path": model_path}))
        self._resolved = resolved
        self._engine = Embedded(resolved, PrivateFolder(), ENTRIES)
        # Also when the last reference goes and at the exit of the interpreter.
        self._end = weakref.finalize(self, self._engine.stop)
        try:
            # While the engine loads. Not on top: who only asks for the class need not wait for the HTTP library.
            from radixpd.offline.runs import Runs
            from radixpd.server.process import build_service

            self._client = self._engine.client
            service = build_service(resolved, self._client)
            self._manager = service.manager
            self._runs = Runs(service)
            self._engine.wait_ready()
            self._manager.warm = True
        except BaseException:
            self._end()
            raise

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: Sampling = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        use_tqdm: bool | Callable[..., Any] = True,
        **options: Any,
    ) -> Any:
        """The answer to one prompt (a text or token ids), or the list of answers to a list of prompts or to `n` above 1, in order.

        With `stream` an iterator of events instead: each holds the answer so far, and `index` when there are several outputs.
        `use_tqdm`: a progress bar for batches that take longer than a second; a callable is used in place of `tqdm`.
        """
        return self._result(self._runs.prompts(prompts, input_ids, sampling_params, options), stream, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Sampling = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        stream: bool = False,
        use_tqdm: bool | Callable[..., Any] = True,
        **options: Any,
    ) -> Any:
        """The same for one conversation (a list of `{"role": ..., "content": ...}`), or a list of conversations. Without
        `max_new_tokens` an answer may fill the rest of the context."""
        rendering = {"generation": add_generation_prompt, "continued": continue_final_message, "template_kwargs": chat_template_kwargs}
        return self._result(self._runs.conversations(messages, sampling_params, options, rendering), stream, use_tqdm)

    async def async_generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: Sampling = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """`generate` for coroutines of any event loop; with `stream` the result is an async iterator. Cancelling it aborts."""
        batch = self._runs.prompts(prompts, input_ids, sampling_params, options)
        if stream:
            return self._async_events(batch)
        return _shown(batch, await self._engine.wait_for(self._runs.answers(batch)))

    def flush_cache(self) -> None:
        """Empty the prefix cache; a `BadRequest` while requests run."""
        self._engine.call(self._client.control("flush_cache"))

    def abort(self, rid: str) -> int:
        """End the outputs of the prompt with this `rid`, wherever they are; how many were open. Their answers say so."""
        return self._engine.call(self._aborted(lambda: self._manager.abort(rid)))

    def abort_all(self) -> int:
        """End everything that is open."""
        return self._engine.call(self._aborted(self._manager.abort_all))

    def pause_generation(self, mode: str = "abort") -> None:
        """Run no step until `continue_generation`. What runs now keeps its KV (`in_place`), goes back to the queue (`retract`), or ends
        (`abort`). Returns once the runner is still; prompts that come later wait."""
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}"[:200], param="mode")
        self._engine.call(self._client.control(f"pause_{mode}", seconds=PAUSE_SECONDS))

    def continue_generation(self) -> None:
        """End a pause."""
        self._engine.call(self._client.control("continue"))

    def get_server_info(self) -> dict[str, Any]:
        """Settings, sizes, the scheduler's load and where every request is."""
        state = self._engine.call(self._client.control("state"))
        view = {name: value for name, value in public_view(self._resolved).items() if name not in SERVER_ONLY}
        return {**view, "version": __version__, "load": asdict(self._client.load), "internal_states": [state]}

    @property
    def tokenizer_directory(self) -> str:
        """Folder of the model's tokenizer files, for who wants to count or cut."""
        return self._resolved.tokenizer_directory

    def shutdown(self) -> None:
        """End the engine's processes. Calls that still wait raise `EngineFailed`; once more does nothing."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()

    async def _aborted(self, abort: Callable[[], int]) -> int:
        self._manager.check_open()
        return abort()

    def _result(self, batch: Batch, stream: bool, use_tqdm: bool | Callable[..., Any]) -> Any:
        if stream:
            return self._events(batch)
        with Progress(len(batch.asks), self._client, _bar(use_tqdm) if len(batch.asks) > 1 else None) as progress:
            return _shown(batch, self._engine.call(self._runs.answers(batch, progress), tick=progress.show))

    def _events(self, batch: Batch) -> Iterator[Answer]:
        stream = self._runs.stream(batch)
        try:
            while (news := self._engine.call(stream.next())) is not None:
                yield from news
        finally:
            with contextlib.suppress(EngineFailed):
                self._engine.call(stream.close())

    async def _async_events(self, batch: Batch) -> AsyncIterator[Answer]:
        stream = self._runs.stream(batch)
        try:
            while (news := await self._engine.wait_for(stream.next())) is not None:
                for event in news:
                    yield event
        finally:
            with contextlib.suppress(EngineFailed):
                await self._engine.wait_for(stream.close())


def _shown(batch: Batch, answers: list[Answer]) -> Any:
    return answers if batch.many else answers[0]


def _bar(wish: bool | Callable[..., Any]) -> Callable[..., Any] | None:
    """What draws a progress bar, if anything does."""
    if wish is True:
        from tqdm import tqdm

        return tqdm  # type: ignore[no-any-return]
    return wish or None


def _refuse_strangers(settings: Mapping[str, Any]) -> None:
    for name in settings:
        if name.replace("-", "_") in SERVER_ONLY:
            raise ConfigError(f"{name}: this is for a server; an LLM inside a program takes no requests from outside")
