"""Launches of compiled kernels without Triton's search for them.

`kernel[grid](...)` builds a text of every argument's type and of every option to find what was
compiled, at every launch; a step that is not a graph has hundreds. Here the caller's key finds it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from triton.runtime import driver

from granikv.attention.kernels.common import INTERPRET


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
        are specialised, constants, options.
        """
        if INTERPRET:
            self.kernel[grid](*arguments, **constants, **options)
            return
        place = driver.active.get_current_device(), key
        found = self._compiled.get(place)
        if found is None:
            compiled = self.kernel[grid](*arguments, **constants, **options)
            names = self.kernel.arg_names[len(arguments) :]
            self._compiled[place] = compiled, tuple(constants[name] for name in names)
            return
        compiled, tail = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *tail)
