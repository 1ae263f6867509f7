"""Errors that cross a public boundary.

Each carries the code of the serving contract, so that a front end never has to guess it from text.
"""

from __future__ import annotations


class GraniKVError(Exception):
    """Base class. `code` is the code a Triton client sees."""

    code = "INTERNAL"


class Quantity(str):
    """A number with its unit, without quotes in messages: "9 tokens"."""

    __repr__ = str.__str__


class InvalidArgument(GraniKVError, ValueError):
    """A field of a request or of a configuration is wrong; names field, value and limit."""

    code = "INVALID_ARG"

    def __init__(self, name: str, got: object, expected: str):
        super().__init__(f"{name}: expected {expected}, got {got!r}")
        self.name, self.got, self.expected = name, got, expected

    def __reduce__(self):
        return type(self), (self.name, self.got, self.expected)


class Unsupported(GraniKVError):
    """A known feature that this build does not serve."""

    code = "UNSUPPORTED"


class AlreadyExists(GraniKVError):
    """A live request has the same id."""

    code = "ALREADY_EXISTS"


class NotFound(GraniKVError):
    """A named thing does not exist."""

    code = "NOT_FOUND"


class Unavailable(GraniKVError):
    """Queue full, shutting down, or a needed process is dead."""

    code = "UNAVAILABLE"


class ModelFileError(GraniKVError):
    """A model file is missing, truncated, corrupt or of an unknown kind; names the file."""

    code = "INVALID_ARG"


class EngineMismatch(ModelFileError):
    """Engines that do not fit this machine, library, checkpoint or request; says what does."""


class ArenaExhausted(GraniKVError):
    """No free token slots, even after eviction. The scheduler preempts on it."""

    code = "UNAVAILABLE"


def check_host_port(name: str, text: str, where: str) -> None:
    """Raises InvalidArgument unless `text` is host:port."""
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 1 <= int(port) <= 65535
    if not is_port or not host or any(c in "/: \t\n" for c in host):
        raise InvalidArgument(name, text, f"host:port {where}, port 1 to 65535")
