"""What programs are written with: `gen`, `select` and the roles. Each returns an expression, to be appended to a state.

Arguments that cannot be right are refused here, at the line that gives them; ranges are the server's to check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from radixpd_lang.choices import ChoicesMethod
from radixpd_lang.ir import Expression, Gen, RoleBegin, RoleEnd, Select, expression
from radixpd_lang.place import here
from radixpd_lang.sampling import Sampling, dtype_of, schema_text
from radixpd_lang.transcript import ROLES

__all__ = ["assistant", "assistant_begin", "assistant_end", "gen", "gen_int", "gen_string", "role_begin", "role_end", "select", "system",
    "system_begin", "system_end", "turn", "user", "user_begin", "user_end"]  # fmt: skip

DEFAULT_METHOD = ChoicesMethod.TOKEN_LENGTH_NORMALIZED


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    repetition_penalty: float | None = None,
    logit_bias: Mapping[str, float] | None = None,
    ignore_eos: bool | None = None,
    skip_special_tokens: bool | None = None,
    no_stop_trim: bool | None = None,
    seed: int | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    token_ids_logprob: Sequence[int] | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | str = DEFAULT_METHOD,
    json_schema: str | Mapping[str, Any] | type | None = None,
    regex: str | None = None,
    ebnf: str | None = None,
    structural_tag: str | None = None,
) -> Expression:
    """Let the model write; the text becomes the variable `name`.

    What is left out is taken from the arguments of `run`, else from the server's defaults. With `n` the variable is a list of texts, and
    the program goes on with the first. `dtype` (int, float, bool, str) is a grammar, and the variable has that type. `json_schema` (text,
    a mapping or a pydantic model), `regex`, `ebnf` and `structural_tag` are grammars, one at most. With `choices` this is `select`.
    """
    if choices is not None:
        given = {"dtype": dtype, "json_schema": json_schema, "regex": regex, "ebnf": ebnf, "structural_tag": structural_tag, "n": n}
        if wrong := [word for word, value in given.items() if value is not None]:
            raise ValueError(f"choices leave nothing to {' and '.join(wrong)}")
        return select(name, choices, choices_method=choices_method)
    if dtype is not None:
        if any(grammar is not None for grammar in (json_schema, regex, ebnf, structural_tag)):
            raise ValueError("dtype is a grammar: give no other")
        regex = dtype_of(dtype).pattern
    sampling = Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        n=n,
        stop=stop,
        stop_token_ids=stop_token_ids,
        stop_regex=stop_regex,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=logit_bias,
        ignore_eos=ignore_eos,
        skip_special_tokens=skip_special_tokens,
        no_stop_trim=no_stop_trim,
        seed=seed,
        return_logprob=return_logprob,
        logprob_start_len=logprob_start_len,
        top_logprobs_num=top_logprobs_num,
        token_ids_logprob=token_ids_logprob,
        return_text_in_logprobs=return_text_in_logprobs,
        json_schema=None if json_schema is None else schema_text(json_schema),
        regex=regex,
        ebnf=ebnf,
        structural_tag=structural_tag,
    )
    return Expression((Gen(_checked(name), sampling, None if dtype is None else dtype_of(dtype), here()),))


def gen_int(name: str | None = None, **options: Any) -> Expression:
    """`gen` with `dtype=int`."""
    return gen(name, **options, dtype=int)


def gen_string(name: str | None = None, **options: Any) -> Expression:
    """`gen` with `dtype=str`: a quoted string; the variable has no quotes."""
    return gen(name, **options, dtype=str)


def select(name: str | None = None, choices: Sequence[str] = (), *, choices_method: ChoicesMethod | str = DEFAULT_METHOD) -> Expression:
    """Append the choice that the model finds likeliest; it becomes the variable `name`. `choices_method`: see `ChoicesMethod`."""
    if isinstance(choices, str) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError(f"choices must be a list of texts, none of them empty, got {choices!r}")
    if len(set(choices)) < len(choices):
        raise ValueError(f"choices must differ, got {choices!r}")
    return Expression((Select(_checked(name), tuple(choices), ChoicesMethod.of(choices_method), here()),))


def turn(role: str, content: Expression | str) -> Expression:
    """A whole turn of a conversation."""
    inside = expression(content)
    if inside is None:
        raise TypeError(f"a turn holds text and expressions, got {type(content).__name__}")
    return role_begin(role) + inside + role_end(role)


def system(content: Expression | str) -> Expression:
    """A system turn."""
    return turn("system", content)


def user(content: Expression | str) -> Expression:
    """A user's turn."""
    return turn("user", content)


def assistant(content: Expression | str) -> Expression:
    """An assistant's turn, usually with a `gen` or a `select` in it."""
    return turn("assistant", content)


def role_begin(role: str) -> Expression:
    """A turn begins."""
    if role not in ROLES:
        raise ValueError(f"a role is one of {', '.join(ROLES)}, got {role!r}")
    return Expression((RoleBegin(role, here()),))


def role_end(role: str) -> Expression:
    """The turn ends."""
    return Expression((RoleEnd(role, here()),))


def system_begin() -> Expression:
    """A system turn begins."""
    return role_begin("system")


def system_end() -> Expression:
    """The system turn ends."""
    return role_end("system")


def user_begin() -> Expression:
    """A user's turn begins."""
    return role_begin("user")


def user_end() -> Expression:
    """The user's turn ends."""
    return role_end("user")


def assistant_begin() -> Expression:
    """An assistant's turn begins."""
    return role_begin("assistant")


def assistant_end() -> Expression:
    """The assistant's turn ends."""
    return role_end("assistant")


def _checked(name: str | None) -> str | None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"a variable's name is text, got {type(name).__name__}")
    return name
