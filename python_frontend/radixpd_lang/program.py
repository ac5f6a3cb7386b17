"""`@function`: a Python function whose first argument is a state, as a program that can be run, run for a batch, and traced.

The function's own thread only appends; whatever waits for the model runs on the event loop. Arguments of `run` that this package knows
(`RUN_ARGUMENTS`) are taken out, the rest goes to the function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, overload

from radixpd_lang.backends.base import Backend
from radixpd_lang.batch import Batch
from radixpd_lang.branch import Branch
from radixpd_lang.errors import LangError
from radixpd_lang.place import Place
from radixpd_lang.run import Options, Run
from radixpd_lang.sampling import Sampling
from radixpd_lang.state import ProgramState
from radixpd_lang.trace import Trace, TraceBackend, placeholders

__all__ = ["RUN_ARGUMENTS", "Function", "function", "get_default_backend", "set_default_backend"]

SAMPLING_ARGUMENTS = (
    "max_tokens", "max_new_tokens", "min_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "ignore_eos", "skip_special_tokens", "no_stop_trim",
    "return_logprob", "top_logprobs_num", "return_text_in_logprobs",
)  # fmt: skip
OTHER_ARGUMENTS = ("backend", "stream", "timeout", "hints", "seed")
RUN_ARGUMENTS = (*OTHER_ARGUMENTS, *SAMPLING_ARGUMENTS)

_default: Backend | None = None


def set_default_backend(backend: Backend | None) -> None:
    """The backend of programs that are run without one."""
    global _default
    _default = backend


def get_default_backend() -> Backend:
    """The backend that was set."""
    if _default is None:
        raise LangError("no backend: give backend=..., or call set_default_backend(RuntimeEndpoint('http://127.0.0.1:30000'))")
    return _default


def function(body: Callable[..., Any]) -> Function:
    """Make a program of a function whose first argument is the state."""
    return Function(body)


class Function:
    """A program. Called with a state it is part of the program that the state belongs to; called without, it is `run`."""

    def __init__(self, body: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        self._signature = inspect.signature(body)
        names = list(self._signature.parameters)
        if not names:
            raise TypeError(f"{body.__name__} takes no state: its first argument is the state")
        if taken := [name for name in names[1:] if name in RUN_ARGUMENTS]:
            raise TypeError(f"{body.__name__}: {', '.join(taken)} is an argument of run; call the function's own something else")
        self.body = body
        self.name = body.__name__
        self.bound = dict(bound or {})
        self.place = Place(body.__code__.co_filename, body.__code__.co_firstlineno)
        functools.update_wrapper(self, body)

    def bind(self, **arguments: Any) -> Function:
        """The program with some of its arguments given."""
        self._signature.bind_partial(None, **{**self.bound, **arguments})
        return Function(self.body, {**self.bound, **arguments})

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """With a state first: carry the program out there, and return what it returns. Otherwise: `run`."""
        if arguments and isinstance(arguments[0], ProgramState):
            return self.body(*arguments, **{**self.bound, **keywords})
        return self.run(*arguments, **keywords)

    def run(
        self,
        *arguments: Any,
        backend: Backend | None = None,
        stream: bool = False,
        timeout: float = 600.0,
        hints: bool = True,
        **keywords: Any,
    ) -> ProgramState:
        """Run the program; the state when it has ended, with `stream` at once.

        Sampling arguments (`max_tokens`, `temperature` ...) are the defaults of every `gen`. `seed`: every `gen` without one draws its own
        from it, so that the whole program repeats. `timeout`: seconds for the whole program. `hints=False`: send nothing but what the
        program asks for. What goes wrong is a `ProgramError` that says where; with `stream` those who read the state get it.
        """
        given, rest = _split(keywords)
        options = _options(backend or get_default_backend(), given, stream=stream, timeout=timeout, hints=hints)
        execution = self.prepare(options, arguments, rest)
        if not stream:
            execution.execute()
        else:
            threading.Thread(target=execution.execute_quietly, name=self.name, daemon=True).start()
        return execution.state

    @overload
    def run_batch(
        self, batch: Iterable[Mapping[str, Any]], *, generator_style: Literal[False] = False, **keywords: Any
    ) -> list[ProgramState]: ...

    @overload
    def run_batch(
        self, batch: Iterable[Mapping[str, Any]], *, generator_style: Literal[True], **keywords: Any
    ) -> Iterator[ProgramState]: ...

    def run_batch(
        self,
        batch: Iterable[Mapping[str, Any]],
        *,
        backend: Backend | None = None,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        timeout: float = 600.0,
        hints: bool = True,
        **keywords: Any,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run the program once for each mapping of arguments, `num_threads` at a time; the states in the order of the batch.

        A program that fails does not end the others: its state has an `error()`, reading from it raises it, and a warning counts such
        programs. `generator_style` gives an iterator that starts programs as their states are taken; leaving it ends the rest. What all
        prompts begin with is found by tracing a few of the programs up to their first request (so that much of the function runs once
        more for them), and computed first; `hints=False` leaves that out. `timeout` is for each program. `seed`: that of the first
        program, the next ones follow.
        """
        given, rest = _split(keywords)
        if rest:
            raise TypeError(f"run_batch has no argument {', '.join(rest)}: what all programs share is given with bind")
        options = _options(backend or get_default_backend(), given, stream=False, timeout=timeout, hints=hints)
        states = Batch(self, options, batch, num_threads, progress_bar).states(lazily=generator_style)
        return states if generator_style else list(states)

    def trace(self, *arguments: Any, **keywords: Any) -> Trace:
        """What the program would do, without a model: a tree of its nodes. Arguments that are left out, and what the model would write,
        are texts like `{name}`; a program that computes with them is traced up to there."""
        given, rest = _split(keywords)
        options = _options(TraceBackend(), given, stream=False, timeout=60.0, hints=False)
        missing = placeholders(self.body, arguments, {**self.bound, **rest})
        execution = self.prepare(dataclasses.replace(options, recording=True), arguments, {**rest, **missing})
        return Trace.of(execution)

    def check(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any], where: str = "") -> None:
        """Wrong arguments are a `TypeError`."""
        try:
            self._signature.bind(None, *arguments, **{**self.bound, **keywords})
        except TypeError as error:
            raise TypeError(f"{where}{error}") from None

    def prepare(self, options: Options, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Execution:
        """A run that has not begun."""
        self.check(arguments, keywords)
        return Execution(self, options, arguments, {**self.bound, **keywords})


class Execution:
    """One run of a program, in the calling thread."""

    def __init__(self, program: Function, options: Options, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        self.program = program
        self.run = Run(options)
        self.root = Branch(self.run, program.place)
        self.state = ProgramState(self.root)
        self._call = functools.partial(program.body, self.state, *arguments, **keywords)

    def execute(self) -> None:
        """Run it to its end; raises what ends it."""
        self.run.enter()
        try:
            self.state.ret_value = self._call()
        except BaseException as error:
            self.run.abandon(error)
            raise
        self.run.finish()

    def execute_quietly(self) -> None:
        """Run it to its end; the state tells what ended it."""
        with contextlib.suppress(Exception):  # it is `run.error` by now
            self.execute()


def _split(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the run, and of the function."""
    names = ("seed", *SAMPLING_ARGUMENTS)
    return {name: keywords[name] for name in names if name in keywords}, {k: v for k, v in keywords.items() if k not in names}


def _options(backend: Backend, given: dict[str, Any], *, stream: bool, timeout: float, hints: bool) -> Options:
    seed = given.pop("seed", None)
    if "max_new_tokens" in given:  # the server's name
        given["max_tokens"] = given.pop("max_new_tokens")
    return Options(backend=backend, sampling=Sampling(**given), seed=seed, stream=stream, hints=hints, timeout=timeout)
