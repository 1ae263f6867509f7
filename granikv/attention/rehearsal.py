"""Launches that are noted and not made, and compilations that happened while a step was launched.

A launch happens where a layer needs it, so both are told by context (a thread's own, see
contextvars) and not through every signature. It does not need Triton.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class NotedLaunch:
    """launcher: a kernels.launch.Launcher; the rest are the arguments of its call."""

    launcher: Any
    key: Hashable
    grid: tuple[int, ...]
    arguments: tuple
    constants: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.launcher.kernel.__name__

    def compile(self) -> None:
        """For the current device, and loaded. Raises what the compiler raises."""
        self.launcher.compile(self)


@dataclass
class Rehearsal:
    """The first launch with each key, in the order of launches; it keeps their arguments alive."""

    launches: dict[tuple[Any, Hashable], NotedLaunch] = field(default_factory=dict)

    def note(self, launch: NotedLaunch) -> None:
        self.launches.setdefault((launch.launcher, launch.key), launch)


@dataclass(frozen=True)
class Compilation:
    """A kernel that a launch had to wait for: compiled, or found in Triton's cache and loaded."""

    name: str
    elapsed_s: float


_rehearsal: ContextVar[Rehearsal | None] = ContextVar("rehearsal", default=None)
_compilations: ContextVar[list[Compilation] | None] = ContextVar("compilations", default=None)


@contextlib.contextmanager
def rehearsing() -> Iterator[Rehearsal]:
    """No kernel of ours runs within it: what it would write stays as it is."""
    made = Rehearsal()
    token = _rehearsal.set(made)
    try:
        yield made
    finally:
        _rehearsal.reset(token)


def current_rehearsal() -> Rehearsal | None:
    return _rehearsal.get()


@contextlib.contextmanager
def noting_compilations() -> Iterator[list[Compilation]]:
    """Those of launches within it, as they come."""
    made: list[Compilation] = []
    token = _compilations.set(made)
    try:
        yield made
    finally:
        _compilations.reset(token)


def note_compilation(compilation: Compilation) -> None:
    noted = _compilations.get()
    if noted is not None:
        noted.append(compilation)
