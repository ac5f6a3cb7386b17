"""What the JSON files beside a tokenizer say: named special tokens, added tokens, bos/eos switches, end-of-sequence ids.

`TokenizerConfig` is plain data; absent files mean empty fields, a broken file is a `ConfigError` that names it. Both tokenizers and
the chat template read it, so the files are understood in one place only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radixpd.errors import ConfigError

__all__ = ["AddedToken", "TokenizerConfig", "eos_ids_of_model", "read_json", "read_tokenizer_config"]


@dataclass(frozen=True, slots=True)
class AddedToken:
    """One entry of `added_tokens_decoder`."""

    id: int
    content: str
    special: bool


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """`named`: for example {"bos_token": "<s>"}. `add_bos` and `add_eos` are None where the files do not say."""

    named: dict[str, str] = field(default_factory=dict)
    extra_special: tuple[str, ...] = ()
    added: tuple[AddedToken, ...] = ()
    add_bos: bool | None = None
    add_eos: bool | None = None
    chat_template: Any = None  # a string, a list of {name, template}, or None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} when there is no such file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); see --model-path and --tokenizer-path") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no JSON object; see --model-path and --tokenizer-path")
    return data


def read_tokenizer_config(directory: Path) -> TokenizerConfig:
    """Merge special_tokens_map.json, added_tokens.json and tokenizer_config.json (the last wins)."""
    config = read_json(directory / "tokenizer_config.json")
    merged = {**read_json(directory / "special_tokens_map.json"), **{key: value for key, value in config.items() if value is not None}}
    named = {key: text for key, value in merged.items() if key.endswith("_token") and (text := _content(value)) is not None}
    extra = merged.get("extra_special_tokens") or merged.get("additional_special_tokens") or []
    if isinstance(extra, dict):  # newer files name them: {"image_token": "<image>"}
        named.update({key: text for key, value in extra.items() if (text := _content(value)) is not None})
        extra = list(extra.values())
    return TokenizerConfig(
        named=named,
        extra_special=tuple(text for value in extra if (text := _content(value)) is not None),
        added=_added_tokens(config, read_json(directory / "added_tokens.json")),
        add_bos=_switch(config.get("add_bos_token")),
        add_eos=_switch(config.get("add_eos_token")),
        chat_template=config.get("chat_template"),
    )


def eos_ids_of_model(directory: Path) -> tuple[int, ...]:
    """End-of-sequence ids that generation_config.json and config.json name, in that order, without repeats."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id")
        ids += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]
    return tuple(dict.fromkeys(ids))


def _content(value: Any) -> str | None:
    """A token is written as a string or as {"content": string, ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _switch(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _added_tokens(config: dict[str, Any], older: dict[str, Any]) -> tuple[AddedToken, ...]:
    tokens = {id: AddedToken(id=id, content=text, special=False) for text, id in older.items() if isinstance(id, int)}
    for key, value in (config.get("added_tokens_decoder") or {}).items():
        text = _content(value)
        if text is not None:
            tokens[int(key)] = AddedToken(id=int(key), content=text, special=bool(value.get("special", False)))
    return tuple(tokens[id] for id in sorted(tokens))
