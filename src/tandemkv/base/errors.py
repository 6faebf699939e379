"""Errors, by who must act on them.

Law: every error a user can meet is one line that names the cause and what to do. Running out of
pages is not an error: reserve() returns False and the scheduler waits or suspends.
"""


class TandemError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(TandemError):
    """The operator must change something: an option, a model, a drafter that does not fit."""


class RequestError(TandemError):
    """The client must change its request.

    status: the HTTP status to answer with; param: the request field at fault, if one is.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class PeerError(TandemError):
    """Another worker failed or does not fit; the request may be retried elsewhere."""


class InvariantError(TandemError):
    """A law of ours is broken: a defect in this project. Never caught and continued from."""
