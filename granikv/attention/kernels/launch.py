"""Launches of compiled kernels without Triton's search for them.

`kernel[grid](...)` builds a text of every argument's type and of every option to find what was
compiled, at every launch; a step that is not a graph has hundreds. Here the caller's key finds it.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any

from triton.runtime import driver

from granikv.attention.kernels.common import INTERPRET
from granikv.attention.rehearsal import (
    Compilation,
    NotedLaunch,
    current_rehearsal,
    note_compilation,
)


class Launcher:
    """Of one kernel."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        # (device, caller's key) -> compiled kernel, and its constants as the last arguments
        self._compiled: dict[tuple[int, Hashable], tuple[Any, tuple]] = {}

    def __call__(
        self,
        key: Hashable,
        grid: tuple[int, ...],
        arguments: tuple,
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        """kernel[grid](*arguments, **constants, **options).

        arguments: of the first parameters; constants: of all others. key: different where Triton
        would take another compiled kernel: types of arguments, alignment of pointers, numbers that
        are specialised, constants, options. Within `rehearsing` it is noted, nothing else.
        """
        rehearsal = current_rehearsal()
        if rehearsal is not None:
            rehearsal.note(NotedLaunch(self, key, grid, arguments, constants, options))
            return
        if INTERPRET:
            self.kernel[grid](*arguments, **constants, **options)
            return
        place = driver.active.get_current_device(), key
        found = self._compiled.get(place)
        if found is None:
            begin = time.perf_counter()
            compiled = self.kernel[grid](*arguments, **constants, **options)
            elapsed_s = time.perf_counter() - begin
            self._keep(place, compiled, arguments, constants)
            note_compilation(Compilation(self.kernel.__name__, elapsed_s))
            return
        compiled, tail = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *tail)

    def compile(self, launch: NotedLaunch) -> None:
        """Ready to launch on the current device; any thread. Nothing runs."""
        if INTERPRET:
            return
        place = driver.active.get_current_device(), launch.key
        if place in self._compiled:
            return
        compiled = self.kernel.warmup(
            *launch.arguments, grid=launch.grid, **launch.constants, **launch.options
        )
        compiled._init_handles()  # else the first launch loads it, and compiles its launcher in C
        self._keep(place, compiled, launch.arguments, launch.constants)

    def _keep(
        self, place: tuple[int, Hashable], compiled: Any, arguments: tuple, constants: dict
    ) -> None:
        names = self.kernel.arg_names[len(arguments) :]
        self._compiled[place] = compiled, tuple(constants[name] for name in names)
