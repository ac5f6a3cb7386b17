"""Command-line flags out of a dataclass whose fields carry `flag(...)` metadata: the field is the flag, its help and its range.

Invariant: a value outside its field's range or choices never reaches the dataclass; argparse ends with one line that names the flag.
Called by the benchmark programs, each with the dataclasses it needs.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from typing import Any, TypeVar

from radixpd.config.settings import flag

__all__ = ["add_flags", "flag", "new_parser", "read_flags"]

T = TypeVar("T")


def new_parser(module: str, about: str) -> argparse.ArgumentParser:
    """The parser of `python -m MODULE`."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        usage=f"python -m {module} [flags]",
        description=about,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=120),
    )


def add_flags(parser: argparse.ArgumentParser, holder: type[Any]) -> None:
    """One flag for each field of the dataclass `holder`, in a group named after its docstring."""
    group = parser.add_argument_group((holder.__doc__ or holder.__name__).splitlines()[0].rstrip("."))
    for field in dataclasses.fields(holder):
        kind, many = _kind(typing.get_type_hints(holder)[field.name])
        name, metadata = "--" + field.name.replace("_", "-"), field.metadata
        silent = field.default is None or field.default is False or field.default == () or metadata["secret"]
        shown = "" if silent else f" (default: {field.default})"
        options: dict[str, Any] = {"help": (metadata["help"] + shown).replace("%", "%%"), "default": field.default, "dest": field.name}
        if kind is bool:
            group.add_argument(name, action="store_true", **options)
            continue
        options |= {"type": _converter(kind, metadata), "metavar": metadata["metavar"] or kind.__name__.upper()}
        if metadata["choices"]:
            options["metavar"] = "{" + ",".join(metadata["choices"]) + "}"
        if many:
            options["nargs"] = "+"
        group.add_argument(name, **options)


def read_flags(namespace: argparse.Namespace, holder: type[T]) -> T:
    """The dataclass, filled from parsed arguments."""
    names = [field.name for field in dataclasses.fields(typing.cast(Any, holder))]
    values = {name: getattr(namespace, name) for name in names}
    return holder(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _kind(hint: Any) -> tuple[type, bool]:
    """The type of one value, and whether the flag takes several."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def _converter(kind: type, metadata: typing.Mapping[str, Any]) -> typing.Callable[[str], Any]:
    low, high, choices = metadata["low"], metadata["high"], metadata["choices"]

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no {kind.__name__}") from None
        if choices and value not in choices:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(choices)}, got {text!r}")
        # Written so that nan fails too.
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            raise argparse.ArgumentTypeError(f"must be between {low} and {high}, got {text}")
        return value

    return convert
