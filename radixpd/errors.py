"""Every exception radixpd raises on purpose.

    RadixpdError
    ├── ConfigError      at start: a flag, a path or the machine does not fit; one line, exit code 2
    ├── BadRequest       400: the client's request is wrong; names the field and the allowed range
    ├── Overloaded       503 (or 429): right request, wrong moment; carries Retry-After
    ├── DeadlineExceeded 504: the request was not finished within --request-timeout
    ├── PeerFailed       502 (or 504): another server that this one depends on failed
    └── EngineFailed     500: a process of this server failed; the group is about to exit

Invariant: what a client reads is `str(error)`, so messages never hold secrets, paths of this machine or stack traces.
"""

from __future__ import annotations

__all__ = ["BadRequest", "ConfigError", "DeadlineExceeded", "EngineFailed", "Overloaded", "PeerFailed", "RadixpdError"]


class RadixpdError(Exception):
    """Root of the tree; `status` is the HTTP status that an API route answers with, `code` a stable word for clients, if there is one."""

    status = 500
    code: str | None = None


class ConfigError(RadixpdError):
    """The server cannot start as asked. The message says what, where and which option."""


class BadRequest(RadixpdError):
    """The request is refused at the door.

    `param` names the offending field, `code` is a stable word for clients (for example `context_length_exceeded`).
    """

    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class Overloaded(RadixpdError):
    """The server is full or draining; the same request may succeed after `retry_after` seconds."""

    status = 503

    def __init__(self, message: str, *, retry_after: int = 1, status: int = 503) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.status = status


class DeadlineExceeded(RadixpdError):
    """The request ran longer than the server allows; it has been aborted."""

    status = 504
    code = "deadline_exceeded"


class PeerFailed(RadixpdError):
    """A peer server failed, was silent for too long (504), or cannot be paired with."""

    status = 502
    code = "peer_failed"

    def __init__(self, message: str, *, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


class EngineFailed(RadixpdError):
    """A process of this server failed; every open request ends with this error."""

    status = 500
