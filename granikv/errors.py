"""Errors that cross a public boundary.

Each carries the code of the serving contract, so that a front end never has to guess it from text.
"""

from __future__ import annotations

MAX_SHOWN, MAX_SHOWN_VALUES = 100, 4  # of a value in an error: characters, elements of a list


class GraniKVError(Exception):
    """Base class. `code` is the code a Triton client sees."""

    code = "INTERNAL"


class Quantity(str):
    """A number with its unit, without quotes in messages: "9 tokens"."""

    __repr__ = str.__str__


def shown(value: object) -> str:
    """`value` as errors show it: what is long by its start and its length."""
    if isinstance(value, list | tuple):
        more = f", ... ({len(value)} values)" if len(value) > MAX_SHOWN_VALUES else ""
        return f"[{', '.join(map(shown, value[:MAX_SHOWN_VALUES]))}{more}]"
    size = 0
    shortened = value
    if isinstance(value, str | bytes) and len(value) > MAX_SHOWN:  # not repr of all of it
        size, shortened = len(value), value[:MAX_SHOWN]
    text = repr(shortened)
    if not size and len(text) <= MAX_SHOWN + len("b''"):
        return text
    unit = "bytes" if isinstance(value, bytes) else "characters"
    return f"{text[:MAX_SHOWN]}... ({size or len(text)} {unit})"


class InvalidArgument(GraniKVError, ValueError):
    """A field of a request or of a configuration is wrong; names field, value and limit."""

    code = "INVALID_ARG"

    def __init__(self, name: str, got: object, expected: str):
        super().__init__(f"{name}: expected {expected}, got {shown(got)}")
        self.name, self.got, self.expected = name, got, expected

    def __reduce__(self):
        return type(self), (self.name, self.got, self.expected)


class Unsupported(GraniKVError):
    """A known feature that this build does not serve."""

    code = "UNSUPPORTED"


class AlreadyExists(GraniKVError):
    """A live request has the same id."""

    code = "ALREADY_EXISTS"

    def __init__(self, request_id: str):
        super().__init__(f"request id {shown(request_id)}: a live request has it")
        self.request_id = request_id

    def __reduce__(self):
        return type(self), (self.request_id,)


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
