"""Command line (and `--config file.yaml`), or keywords of a program -> `Settings`, built from the metadata of the settings' fields.

`parse_as` does the same for another program's settings (the load balancer's): a dataclass of groups whose fields are `settings.flag`s.

Invariant: a value is checked once, by the same code, wherever it comes from; the command line wins over the file. Every fault is a
`ConfigError` of one line that names the flag, the value and what is allowed, and never shows a secret. Called by the `launch_*` modules,
the load balancer and `llm`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import json
import os
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from radixpd import __version__
from radixpd.config.known_flags import ALIASES, REFUSED, VALUE_REASONS, refusal
from radixpd.config.secret import Secret
from radixpd.config.settings import Settings
from radixpd.errors import ConfigError

__all__ = ["from_keywords", "parse", "parse_as"]

Root = TypeVar("Root")


@dataclass(frozen=True, slots=True)
class Option:
    """One field of `Settings` as the command line sees it; `name` is the flag without its leading dashes."""

    group: str
    field: dataclasses.Field[Any]
    kind: type
    many: bool

    @property
    def name(self) -> str:
        return self.field.name.replace("_", "-")


def parse(argv: Sequence[str]) -> Settings:
    """`argv` without the program's name. `--help` and `--version` print and exit."""
    usage = "--model-path MODEL [flags]"
    return _checked(parse_as(Settings, argv, program="radixpd.launch_server", usage=usage, about="Serve a language model over HTTP."))


def parse_as(root: type[Root], argv: Sequence[str], *, program: str, usage: str, about: str) -> Root:
    """The settings of any program: `root` is a dataclass of groups. `program`: its module; `usage`: what follows it on a command line."""
    options = {option.name: option for option in _options(root)}
    _refuse_strangers(argv, options)
    parser = _parser(options, root, program=program, usage=usage, about=about)
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    file = given.pop("config", None)
    return _settings(root, options, (_read_file(file, options) if file is not None else {}) | given)


def from_keywords(keywords: Mapping[str, Any]) -> Settings:
    """Keyword arguments, named like the flags with underscores; `config` names a file, which they win over. None means the default."""
    options = {option.name: option for option in _options(Settings)}
    raw: dict[str, Any] = {}
    file = keywords.get("config")
    for key, value in keywords.items():
        written = key.replace("_", "-")
        name = ALIASES.get(written, written)
        if name == "config":
            continue
        if name not in options:
            reason = refusal(name) or f"there is no such setting; the nearest is {_nearest(name, options).replace('-', '_')}"
            raise ConfigError(f"{key}: {reason}")
        if name in raw:
            raise ConfigError(f"{key} is given twice, under another name too")
        if value is not None:
            raw[name] = _plain(value)
    return _checked(_settings(Settings, options, (_read_file(os.fspath(file), options) if file is not None else {}) | raw))


def _plain(value: Any) -> Any:
    """What a file would hold."""
    if isinstance(value, tuple):
        return list(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _checked(settings: Settings) -> Settings:
    if not settings.model.model_path:
        raise ConfigError("--model-path is missing: give a model directory, a hub id, a .gguf file, or demo")
    return settings


def _settings(root: type[Root], options: Mapping[str, Option], raw: Mapping[str, Any]) -> Root:
    values: dict[str, dict[str, Any]] = {}
    for name, value in raw.items():
        option = options[name]
        values.setdefault(option.group, {})[option.field.name] = _convert(option, value)
    defaults = root()
    return root(**{group: dataclasses.replace(getattr(defaults, group), **fields) for group, fields in values.items()})


def _options(root: type) -> Iterator[Option]:
    for group, holder in typing.get_type_hints(root).items():
        for field in dataclasses.fields(holder):
            kind = typing.get_type_hints(holder)[field.name]
            if typing.get_origin(kind) in (tuple, types.UnionType, typing.Union):
                kind = typing.get_args(kind)[0]
            yield Option(group=group, field=field, kind=kind, many=field.metadata["many"])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def _parser(options: dict[str, Option], root: type, *, program: str, usage: str, about: str) -> argparse.ArgumentParser:
    """Collects raw values only: argparse neither converts nor checks, so that a file's values meet the same rules."""
    parser = _Parser(
        prog=f"python -m {program}",
        usage=f"python -m {program} {usage}",
        description=about,
        allow_abbrev=False,
        argument_default=None,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=120),
    )
    parser.add_argument("--version", action="version", version=f"radixpd {__version__}")
    parser.add_argument("--config", metavar="FILE", help="YAML file of flags (keys: their names); the command line wins")
    aliases = {target: [alias for alias, name in ALIASES.items() if name == target] for target in ALIASES.values()}
    hints = typing.get_type_hints(root)
    groups = {name: parser.add_argument_group(name, _first_line(holder)) for name, holder in hints.items()}
    for option in options.values():
        flags = [f"--{name}" for name in (option.name, *aliases.get(option.name, []))]
        extra: dict[str, Any]
        if option.kind is bool:
            extra = {"action": argparse.BooleanOptionalAction}
        elif option.many:
            extra = {"action": "extend", "nargs": "+", "metavar": _metavar(option)}
        else:
            extra = {"metavar": _metavar(option)}
        groups[option.group].add_argument(*flags, dest=option.name, help=_help(option), **extra)
    return parser


def _first_line(holder: type) -> str:
    return (holder.__doc__ or "").splitlines()[0]


def _metavar(option: Option) -> str:
    choices = option.field.metadata["choices"]
    named: str | None = option.field.metadata["metavar"]
    word = "N" if option.kind in (int, float) else option.field.name.rsplit("_", 1)[-1].upper()
    return named or ("{" + ",".join(choices) + "}" if choices else word)


def _help(option: Option) -> str:
    text: str = option.field.metadata["help"]
    default = option.field.default
    if default not in (None, "", ()) and not isinstance(default, bool):
        text += f" (default: {default})"
    elif default is True:
        text += " (default: on)"
    return text.replace("%", "%%")


def _refuse_strangers(argv: Sequence[str], options: dict[str, Option]) -> None:
    switches = {f"no-{name}" for name, option in options.items() if option.kind is bool}
    known = {*options, *ALIASES, *switches, "config", "help", "version"}
    for argument in argv:
        name = argument.partition("=")[0].removeprefix("--")
        if argument.startswith("--") and name not in known:
            reason = refusal(name)
            if reason is not None:
                raise ConfigError(f"--{name}: {reason}")
            raise ConfigError(f"unknown flag --{name}; the nearest is --{_nearest(name, options)}")


def _nearest(name: str, options: dict[str, Option]) -> str:
    """The likeliest name meant; one that radixpd has wins a tie over one that it refuses."""
    candidates = [*options, *ALIASES, "config", "help", *REFUSED]
    return max(candidates, key=lambda known: difflib.SequenceMatcher(None, name, known).ratio())


def _read_file(path: str, options: dict[str, Option]) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        twice, data = _first_double(yaml.compose(text, Loader=yaml.SafeLoader)), yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        # The error's own text quotes the line, which may hold a key.
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"--config {path}: {line}{error.problem}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from None
    if twice is not None:
        raise ConfigError(f"--config {path}: {twice} is given twice")
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path}: must hold one flag a line, as in `port: 30000`")
    values: dict[str, Any] = {}
    for key, value in data.items():
        written = str(key).replace("_", "-")
        name = ALIASES.get(written, written)
        if name == "config":
            raise ConfigError(f"--config {path}: config: a configuration file cannot name another one")
        if name not in options:
            reason = refusal(name)
            raise ConfigError(
                f"--config {path}: {key}: {reason}"
                if reason
                else f"--config {path}: unknown key {key}; the nearest is {_nearest(name, options)}"
            )
        if name in values:
            raise ConfigError(f"--config {path}: {name} is given twice")
        if value is not None:
            values[name] = value
    return values


def _first_double(node: yaml.Node | None) -> str | None:
    """The first key that some mapping of the document holds twice: YAML's own reader keeps the last value without a word."""
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        # An alias makes a node its own descendant.
        if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if double := next((key for key, count in keys.items() if count > 1), None):
                return str(double)
            waiting += [value for _, value in node.value]
        else:
            waiting += node.value
    return None


def _convert(option: Option, value: Any) -> Any:
    if not option.many:
        return _convert_one(option, value)
    return tuple(_convert_one(option, item) for item in (value if isinstance(value, list) else [value]))


def _convert_one(option: Option, value: Any) -> Any:
    if option.field.metadata["secret"]:
        return _secret(option, value)
    if option.kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"--{option.name} {value}: give true or false")
        return value
    if option.kind in (int, float):
        return _number(option, value)
    if isinstance(value, dict):
        value = json.dumps(value, default=str)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"--{option.name} {value}: give text")
    choices = option.field.metadata["choices"]
    if choices and value not in choices:
        raise _refused(option, value, "it is " + choices[0] if len(choices) == 1 else "choose from " + ", ".join(choices))
    return str(value)


def _secret(option: Option, value: Any) -> Secret:
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise ConfigError(f"--{option.name}: a value is empty or no text (quote it)")
    return Secret(str(value))


def _number(option: Option, value: Any) -> float:
    low, high = option.field.metadata["low"], option.field.metadata["high"]
    allowed = f"{'an integer' if option.kind is int else 'a number'} from {low} to {high}" if low != high else f"{low}"
    number: float | None = None
    if isinstance(value, str) or type(value) in (int, option.kind):
        with contextlib.suppress(ValueError, OverflowError):
            number = option.kind(value)
    # Not "number < low or number > high": NaN must fail too.
    if number is None or not low <= number <= high:
        raise _refused(option, value, f"it must be {allowed}")
    return number


def _refused(option: Option, value: Any, rule: str) -> ConfigError:
    reason = VALUE_REASONS.get(option.name)
    return ConfigError(f"--{option.name} {value}: {rule}" + (f"; {reason}" if reason else ""))
