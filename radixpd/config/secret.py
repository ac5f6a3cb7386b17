"""A secret string that cannot be printed by accident.

Invariant: no conversion, format, copy or JSON encoder shows the value; only `reveal` does. `config.cli` wraps the values of flags marked
secret, `config.access` looks at their letters, the API process asks `matches` and takes `digest`s; they leave by `resolve.to_json` alone,
on the way to a child's standard input.
"""

from __future__ import annotations

import hmac

__all__ = ["Secret"]


class Secret:
    """Holds one secret; `str` and `repr` are `***`."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The value itself."""
        return self._value

    def matches(self, candidate: str) -> bool:
        """Whether `candidate` is the secret, in a time that does not depend on where they differ."""
        return hmac.compare_digest(self._value.encode("utf-8", "surrogateescape"), candidate.encode("utf-8", "surrogateescape"))

    def digest(self, purpose: str) -> str:
        """A name for the secret that does not tell it: hex digits that depend on both."""
        return hmac.new(self._value.encode("utf-8", "surrogateescape"), purpose.encode(), "sha256").hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self.matches(other._value)

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __repr__(self) -> str:
        return "***"
