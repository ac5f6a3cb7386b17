"""What a program is made of: nodes, and `Expression`, a row of them that `+` joins.

Nodes are plain data, built by the primitives and read by the interpreter and by traces; every one knows the line that made it. Text joins
expressions as it is: `"Q: " + question + gen("answer")`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixpd_lang.choices import ChoicesMethod
from radixpd_lang.place import Place, here
from radixpd_lang.sampling import Dtype, Sampling

if TYPE_CHECKING:
    from radixpd_lang.values import Value

__all__ = ["Commit", "Expression", "Gen", "Node", "RoleBegin", "RoleEnd", "Select", "Text", "Variable", "expression"]


@dataclass(frozen=True, slots=True)
class Text:
    """Text that the program brings along."""

    text: str
    place: Place


@dataclass(frozen=True, slots=True)
class Gen:
    """Text that the model writes."""

    name: str | None
    sampling: Sampling
    dtype: Dtype | None
    place: Place


@dataclass(frozen=True, slots=True)
class Select:
    """The choice that the model finds likeliest."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod
    place: Place


@dataclass(frozen=True, slots=True)
class RoleBegin:
    """A turn of a conversation begins."""

    role: str
    place: Place


@dataclass(frozen=True, slots=True)
class RoleEnd:
    """The turn of that role ends."""

    role: str
    place: Place


@dataclass(frozen=True, slots=True)
class Variable:
    """The value of a variable, of this state or of another one; it may be still on its way."""

    value: Value
    place: Place


@dataclass(frozen=True, slots=True)
class Commit:
    """Hint: the text so far will be the start of several prompts, let the server compute it now."""

    place: Place


Node = Text | Gen | Select | RoleBegin | RoleEnd | Variable | Commit


@dataclass(frozen=True, slots=True)
class Expression:
    """Nodes in a row."""

    nodes: tuple[Node, ...]

    def __add__(self, other: Expression | str) -> Expression:
        right = expression(other)
        return NotImplemented if right is None else Expression(self.nodes + right.nodes)

    def __radd__(self, other: Expression | str) -> Expression:
        left = expression(other)
        return NotImplemented if left is None else Expression(left.nodes + self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)


def expression(thing: object) -> Expression | None:
    """Text or an expression as an expression; None for anything else."""
    if isinstance(thing, Expression):
        return thing
    if isinstance(thing, str):
        return Expression((Text(str(thing), here()),) if thing else ())
    return None
