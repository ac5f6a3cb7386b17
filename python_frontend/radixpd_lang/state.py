"""What a program sees: the state that it appends to, and the branches of a fork.

Appending never waits. Reading does: a variable, the text, the messages. Every wait ends at the program's deadline, and raises the error
that ended the branch, with the line that caused it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self, overload

from radixpd_lang.branch import Branch
from radixpd_lang.errors import ProgramError
from radixpd_lang.ir import Commit, Expression, Variable, expression
from radixpd_lang.place import here
from radixpd_lang.primitives import role_begin, role_end, turn
from radixpd_lang.transcript import Prompt
from radixpd_lang.values import Meta, Value

__all__ = ["Forks", "ProgramState"]

MAX_FORKS = 4096


class ProgramState:
    """A text or a conversation under way. `ret_value`: what the program's function returned, once it has."""

    def __init__(self, branch: Branch) -> None:
        self._branch = branch
        self.ret_value: Any = None

    # Appending

    def __iadd__(self, other: Expression | str) -> Self:
        """Append text, a `gen`, a turn ..."""
        nodes = expression(other)
        if nodes is None:
            raise TypeError(f"a state takes text and expressions, got {type(other).__name__}; for its text write str(...)")
        for node in nodes:
            self._branch.append(node)
        return self

    def system(self, content: Expression | str | None = None) -> Any:
        """Append a system turn, or with no argument open one: `with s.system(): s += ...`."""
        return self._role("system", content)

    def user(self, content: Expression | str | None = None) -> Any:
        """Append a user's turn, or open one."""
        return self._role("user", content)

    def assistant(self, content: Expression | str | None = None) -> Any:
        """Append an assistant's turn, or open one."""
        return self._role("assistant", content)

    def _role(self, role: str, content: Expression | str | None) -> Any:
        if content is None:
            return self._open(role)
        self += turn(role, content)
        return None

    @contextmanager
    def _open(self, role: str) -> Iterator[None]:
        self += role_begin(role)
        yield
        self += role_end(role)

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """Whatever is appended inside becomes a variable."""
        mark = self._branch.mark(here())
        yield
        self._branch.bind_since(name, mark, here())

    def commit(self) -> None:
        """Hint: several prompts will begin with the text so far. `fork` does this by itself."""
        self._branch.append(Commit(here()))

    # Variables

    def __getitem__(self, name: str) -> Any:
        """The value of a variable; waits until it is there."""
        return self._value(name).get(self._branch.run.deadline)

    def __contains__(self, name: str) -> bool:
        """Whether the program has set such a variable; its value may still be on its way."""
        return name in self._branch.values

    def get_var(self, name: str) -> Any:
        """The same as `state[name]`."""
        return self[name]

    def set_var(self, name: str, content: Any) -> None:
        """Set a variable."""
        self._branch.bind_now(name, content)

    def var(self, name: str) -> Expression:
        """A variable for use in any state, without waiting for it now: `s += other.var("answer")`."""
        return Expression((Variable(self._value(name), here()),))

    def get_meta_info(self, name: str) -> Meta:
        """What the server told about a variable: finish reason, counts of tokens, log-probabilities; for `n` samples also a list of it."""
        value = self._value(name)
        value.get(self._branch.run.deadline)
        return value.meta

    def _value(self, name: str) -> Value:
        """A variable. From outside a program that still runs, wait until it sets one of that name; inside, it must have."""
        branch = self._branch
        if name not in branch.values and not branch.run.is_inside():
            any(name in branch.values for _ in branch.names.read(branch.run.deadline))
        if name in branch.values:
            return branch.values[name]
        raise self._missing(name)

    async def _value_async(self, name: str) -> Value:
        """The same for a coroutine."""
        branch = self._branch
        if name not in branch.values:
            async for _ in branch.names.read_async(branch.run.deadline):
                if name in branch.values:
                    break
        if name in branch.values:
            return branch.values[name]
        raise self._missing(name)

    def _missing(self, name: str) -> BaseException:
        known = ", ".join(self._branch.values) or "none"
        return self.error_so_far() or KeyError(f"no variable {name!r} has been set; there are: {known}")

    # Reading the whole

    def text(self) -> str:
        """All text; in a conversation every turn stands after its role. Waits for everything appended so far."""
        return str(self._prompt())

    def messages(self) -> list[dict[str, str]]:
        """All turns as `{"role": ..., "content": ...}`, the open one too. Waits."""
        return [{"role": message.role, "content": message.content} for message in self._prompt().turns]

    def sync(self) -> None:
        """Wait for everything appended so far."""
        self._prompt()

    def _prompt(self) -> Prompt:
        prompt: Prompt = self._branch.snapshot(here()).get(self._branch.run.deadline)
        return prompt

    def error(self) -> BaseException | None:
        """What went wrong, or None. Waits for everything appended so far."""
        try:
            self.sync()
        except ProgramError as error:
            return self._branch.run.error or error
        return self.error_so_far()

    def error_so_far(self) -> BaseException | None:
        """What has gone wrong in the program or this branch of it until now, or None."""
        return self._branch.run.error or self._branch.failure

    # Streams

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """The text as it grows, or that of one variable."""
        feed = self._branch.feed if name is None else self._value(name).feed
        for text, _ in feed.read(self._branch.run.deadline):
            if text:
                yield text

    @overload
    def text_async_iter(self, name: str | None = None, return_meta_data: Literal[False] = False) -> AsyncIterator[str]: ...

    @overload
    def text_async_iter(self, name: str | None = None, *, return_meta_data: Literal[True]) -> AsyncIterator[tuple[str, Meta]]: ...

    def text_async_iter(self, name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """The same for a coroutine, with `return_meta_data` as pairs of text and meta information. If the coroutine that reads is
        cancelled, so is the program: there is nobody left to read it."""
        return self._pieces(name, return_meta_data)

    async def _pieces(self, name: str | None, with_meta: bool) -> AsyncIterator[Any]:
        try:
            feed = self._branch.feed if name is None else (await self._value_async(name)).feed
            async for text, meta in feed.read_async(self._branch.run.deadline):
                if with_meta:
                    yield text, meta
                elif text:
                    yield text
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End the program: its open requests are closed, whoever waits gets `ProgramCancelled`."""
        self._branch.run.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leaving the block ends a program that still runs."""
        self.cancel()

    # Branches

    def fork(self, size: int = 1) -> Forks:
        """`size` branches that begin here and run at the same time. The server computes their common prefix once."""
        if not 1 <= size <= MAX_FORKS:
            raise ValueError(f"a fork has between 1 and {MAX_FORKS} branches, got {size}")
        return Forks(self, [ProgramState(branch) for branch in self._branch.fork(size, here())])

    @contextmanager
    def copy(self) -> Iterator[ProgramState]:
        """One branch, to try something out."""
        yield self.fork(1)[0]


class Forks:
    """The branches of one fork."""

    def __init__(self, parent: ProgramState, states: Sequence[ProgramState]) -> None:
        self._parent = parent
        self._states = list(states)

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._states)

    @overload
    def __getitem__(self, key: int) -> ProgramState: ...

    @overload
    def __getitem__(self, key: str) -> list[Any]: ...

    def __getitem__(self, key: int | str) -> Any:
        """A branch by number, or the values that a variable has in all branches."""
        return [state[key] for state in self._states] if isinstance(key, str) else self._states[key]

    def __setitem__(self, key: int, state: ProgramState) -> None:
        """For `forks[0] += ...`, which ends with this."""
        if state is not self._states[key]:
            raise TypeError("a branch cannot be replaced")

    def __iadd__(self, other: Expression | str | Sequence[Expression | str] | Callable[[ProgramState], object]) -> Self:
        """Append the same to all branches, or of a list one to each, or call a function with each."""
        if isinstance(other, (str, Expression)):
            others: Sequence[Expression | str] = [other] * len(self)
        elif callable(other):
            for state in self._states:
                other(state)
            return self
        else:
            others = other
        if len(others) != len(self):
            raise ValueError(f"one for each of {len(self)} branches, got {len(others)}")
        for state, each in zip(self._states, others, strict=True):
            state += each
        return self

    def join(self, mode: Literal["gather_variable", "concate_and_append"] = "gather_variable") -> None:
        """Bring the branches together, without waiting for them.

        `gather_variable`: each variable that they have set is, in the state that was forked, the list of their values (None where a
        branch has not set it). `concate_and_append`: what they have written is appended to that state, one after the other.
        """
        branches = [state._branch for state in self._states]
        match mode:
            case "gather_variable":
                self._parent._branch.gather(branches, here())
            case "concate_and_append":
                self._parent._branch.concatenate(branches, here())
            case _:
                raise ValueError(f"mode must be gather_variable or concate_and_append, got {mode!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The end of the block joins the branches."""
        if kind is None:
            self.join()
