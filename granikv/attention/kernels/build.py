"""KernelBuild: how one kernel is compiled, said once for just-in-time and ahead-of-time builds.

Nothing is left to the specialisation of a launch: scalars are not specialised, every pointer is
declared to be aligned, and what varies is a constant or an option here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from granikv.attention.kernels.launch import Launcher
from granikv.attention.variants import AttentionShape

POINTER_ALIGNMENT_BYTES = 16  # of every pointer argument; callers check what they are given


@dataclass(frozen=True)
class KernelBuild:
    """One compiled variant of a kernel.

    types: Triton's type of each parameter that is no constant, in order; T is the element type of
    q, and of KV unless that is FP8. options: num_warps, num_stages, maxnreg, launch_pdl; Triton's default where absent.
    """

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Just in time; arguments in the order of `types`."""
        element = None if self._element is None else arguments[self._element].dtype
        self._launcher(element, grid, arguments, self.constants, self.options)

    @cached_property
    def _launcher(self) -> Launcher:
        return Launcher(self.kernel)

    @cached_property
    def _element(self) -> int | None:
        """A pointer to T among the arguments."""
        places = (index for index, kind in enumerate(self.types.values()) if kind == "*T")
        return next(places, None)

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def signature(self, element: str) -> dict[str, str]:
        """Type of every parameter, as triton.compile takes it; element: fp16, bf16 or fp32."""
        names = [*self.types, *self.constants]
        if sorted(names) != sorted(self.kernel.arg_names):
            raise ValueError(f"{self.name}: expected {self.kernel.arg_names}, described {names}")
        return {
            name: self.types[name].replace("T", element) if name in self.types else "constexpr"
            for name in self.kernel.arg_names
        }

    def attributes(self) -> dict[tuple[int, ...], list[list[Any]]]:
        """The alignment of the pointers, as triton.compile takes it."""
        return {
            (index,): [["tt.divisibility", POINTER_ALIGNMENT_BYTES]]
            for index, name in enumerate(self.kernel.arg_names)
            if self.types.get(name, "").startswith("*")
        }

    def indexed_constants(self) -> dict[tuple[int, ...], Any]:
        """The constants by parameter index, as triton.compile takes them."""
        names = self.kernel.arg_names
        return {(names.index(name),): value for name, value in self.constants.items()}


@dataclass(frozen=True)
class ScaleParameters:
    """Scalars of FP8 KV as parameters of a kernel, or as constants that say there are none."""

    types: dict[str, str]
    constants: dict[str, None]


def scales_of(shape: AttentionShape, *names: str) -> ScaleParameters:
    """A kernel without FP8 KV has no such parameter: None compiles the product away."""
    if shape.fp8_kv:
        return ScaleParameters(dict.fromkeys(names, "fp32"), {})
    return ScaleParameters({}, dict.fromkeys(names))


def scale_arguments(shape: AttentionShape, *scales: float) -> tuple[float, ...]:
    """What a launch passes for `scales_of`."""
    return scales if shape.fp8_kv else ()
