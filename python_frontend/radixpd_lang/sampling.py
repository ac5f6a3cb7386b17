"""How to sample: every argument of `gen` that goes to the server, under SGLang's names.

None means "not said": what `gen` leaves open is taken from the run, what that leaves open is the server's default. Grammars are passed
through; a server that has none refuses them. `DTYPES` are grammars whose text is also turned into a Python value. Called by the primitives,
the interpreter and the backends.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["DTYPES", "GRAMMARS", "OPTION_NAMES", "Dtype", "Sampling", "dtype_of", "schema_text"]

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. The last five ask for log-probabilities, which land in `get_meta_info`."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    stop_regex: str | Sequence[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    token_ids_logprob: Sequence[int] | None = None
    return_text_in_logprobs: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one grammar, not {' and '.join(given)}")
        if self.n is not None and self.n < 1:
            raise ValueError(f"n must be 1 or more, got {self.n}")
        if self.regex is not None:
            try:
                re.compile(self.regex)
            except re.error as error:
                raise ValueError(f"regex {self.regex!r}: {error}") from None

    def over(self, defaults: Sampling) -> Sampling:
        """These parameters, and where they say nothing the defaults. A grammar here replaces one there."""
        said = self.said()
        left = defaults.said()
        if any(name in said for name in GRAMMARS):
            left = {name: value for name, value in left.items() if name not in GRAMMARS}
        return Sampling(**{**left, **said})

    def said(self) -> dict[str, Any]:
        """What is not None, by name."""
        return {name: value for name in OPTION_NAMES if (value := getattr(self, name)) is not None}


OPTION_NAMES = tuple(field.name for field in dataclasses.fields(Sampling))


@dataclass(frozen=True, slots=True)
class Dtype:
    """A type of value: the pattern of its text, how to read it, and a text that fits, for traces and fakes."""

    pattern: str
    read: Callable[[str], Any]
    sample: str


DTYPES: dict[type, Dtype] = {
    int: Dtype(r"-?[0-9]{1,18}", int, "0"),
    float: Dtype(r"-?[0-9]{1,18}(\.[0-9]{1,18})?", float, "0.0"),
    bool: Dtype(r"(True|False)", lambda text: {"True": True, "False": False}[text.strip()], "True"),
    str: Dtype(r'"([^"\\\x00-\x1f]|\\["\\nrt])*"', json.loads, '""'),
}


def dtype_of(dtype: type | str) -> Dtype:
    """The type of value called `dtype`: int, float, bool or str, or one of these words."""
    found = next((value for key, value in DTYPES.items() if dtype in (key, key.__name__)), None)
    if found is None:
        raise ValueError(f"dtype must be one of int, float, bool, str, got {dtype!r}")
    return found


def schema_text(schema: str | Mapping[str, Any] | type) -> str:
    """A JSON schema as text: given as text, as a mapping, or as a pydantic model."""
    make = getattr(schema, "model_json_schema", None)
    if make is not None:
        schema = make()
    if isinstance(schema, str):
        try:
            json.loads(schema)
        except ValueError as error:
            raise ValueError(f"json_schema is no JSON: {error}") from None
        return schema
    if not isinstance(schema, Mapping):
        raise TypeError(f"json_schema must be text, a mapping or a pydantic model, got {type(schema).__name__}")
    return json.dumps(schema)
