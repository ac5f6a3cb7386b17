"""radixpd_lang: programs that call a language model many times, written in Python.

    import radixpd_lang as rx

    @rx.function
    def capital(s, country):
        s += rx.user(f"What is the capital of {country}?")
        s += rx.assistant(rx.gen("answer", max_tokens=16))

    rx.set_default_backend(rx.RuntimeEndpoint("http://127.0.0.1:30000"))
    print(capital.run(country="France")["answer"])

Names follow SGLang's frontend. The package needs nothing of radixpd but a server's URL.
"""

from __future__ import annotations

from typing import Any

from radixpd_lang.backends.base import Backend, Completion, Delta
from radixpd_lang.backends.fake import Fake
from radixpd_lang.backends.openai import OpenAI
from radixpd_lang.backends.runtime_endpoint import RuntimeEndpoint
from radixpd_lang.choices import ChoicesMethod, Scores
from radixpd_lang.errors import BackendError, LangError, ProgramCancelled, ProgramError, ProgramTimeout
from radixpd_lang.ir import Expression
from radixpd_lang.place import Place
from radixpd_lang.primitives import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    select,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
)
from radixpd_lang.program import Function, function, get_default_backend, set_default_backend
from radixpd_lang.sampling import Sampling
from radixpd_lang.state import Forks, ProgramState
from radixpd_lang.trace import Trace
from radixpd_lang.transcript import Message, Prompt

__all__ = [
    "Backend",
    "BackendError",
    "ChoicesMethod",
    "Completion",
    "Delta",
    "Expression",
    "Fake",
    "Forks",
    "Function",
    "LangError",
    "Message",
    "OpenAI",
    "Place",
    "ProgramCancelled",
    "ProgramError",
    "ProgramState",
    "ProgramTimeout",
    "Prompt",
    "RuntimeEndpoint",
    "Sampling",
    "Scores",
    "Trace",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_default_backend",
    "get_server_info",
    "greedy_token_selection",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
]

token_length_normalized = ChoicesMethod.TOKEN_LENGTH_NORMALIZED
greedy_token_selection = ChoicesMethod.GREEDY_TOKEN_SELECTION
unconditional_likelihood_normalized = ChoicesMethod.UNCONDITIONAL_LIKELIHOOD_NORMALIZED


def flush_cache(backend: RuntimeEndpoint | None = None) -> None:
    """Drop the server's prefix cache (of the default backend)."""
    _endpoint(backend).flush_cache()


def get_server_info(backend: RuntimeEndpoint | None = None) -> dict[str, Any]:
    """The server's settings, sizes and load (of the default backend)."""
    return _endpoint(backend).get_server_info()


def _endpoint(backend: RuntimeEndpoint | None) -> RuntimeEndpoint:
    found = backend or get_default_backend()
    if not isinstance(found, RuntimeEndpoint):
        raise LangError(f"only a RuntimeEndpoint can do that, the backend is {type(found).__name__}")
    return found
