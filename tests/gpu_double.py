"""A CPU's executor that launches what one on an H200 does; of use where launches are only noted.

What the choices of kernels ask for (is_cuda, capability, SMs, streams) is made up. Torch's operators
run on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from granikv.attention import gpu
from granikv.attention.gpu import GpuAttention
from granikv.config import EngineConfig, ModelConfig
from granikv.executor.cuda_executor import CudaExecutor
from granikv.models import fp8_linear, fused_kernels, rank_sums, skinny
from granikv.models.fp8 import quantizing
from granikv.models.linear import Linear
from granikv.models.llama import Decoder
from granikv.models.random_weights import random_tensors
from granikv.models.rank_sums import Exchange, exchange_shape
from granikv.models.weights import build_weights
from granikv.sampling import Sampler

NUM_SMS = 8  # few, so that small batches reach what asks for full machines
# heads and widths that the Gluon kernels and the skinny products take
MODEL = ModelConfig("llama", 2, 512, 1024, 8, 2, 128, 97, 512)


class Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    def wait_event(self, event: Event) -> None: ...


class FakeSums:
    """Of rank 0 of two: up to fused_rows rows in the norm's launch, else apart."""

    def __init__(self, max_rows: int, fused_rows: int):
        self.fused_rows = fused_rows
        shape = exchange_shape(2, max_rows, MODEL.hidden_size)
        places = tuple(torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2))
        self.exchange = Exchange(0, places)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def fuses(self, num_rows: int) -> bool:
        return 0 < num_rows <= self.fused_rows

    def add_rms_norm(self, turn: int, *arguments: Any) -> Any:
        return rank_sums.add_rms_norm(self.exchange, turn, *arguments)


def pretend_h200(monkeypatch) -> None:
    """Of everything but attention, whose facts make_executor sets."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(skinny, "_capability", lambda device: (9, 0))
    for module in (skinny, gpu):
        monkeypatch.setattr(module, "sm_count", lambda device: NUM_SMS)
    for module in (fused_kernels, rank_sums):
        monkeypatch.setattr(module, "has_pdl", lambda device: True)
    monkeypatch.setattr(Linear, "__call__", _product)
    monkeypatch.setattr(Linear, "in_fp32", _logits)
    monkeypatch.setattr(fp8_linear.Fp8Linear, "__call__", _fp8_product)
    monkeypatch.setattr(fp8_linear.Fp8Linear, "partial_sums", _fp8_product)


def _product(self: Linear, x: torch.Tensor) -> torch.Tensor:
    """Nobody reads it, and a CPU takes long for bf16."""
    assert self.weight is not None
    return x.new_empty(x.shape[0], self.weight.shape[0])


def _logits(self: Linear, x: torch.Tensor) -> torch.Tensor:
    assert self.weight is not None
    return torch.zeros(x.shape[0], self.weight.shape[0])


def _fp8_product(self: fp8_linear.Fp8Linear, x: Any) -> torch.Tensor:
    rows = fp8_linear.quantize_rows(x, self.fp8_input) if isinstance(x, torch.Tensor) else x
    return torch.empty(rows.values.shape[0], self.scales.shape[1], dtype=self.dtype)


def make_executor(
    config: EngineConfig, model: ModelConfig = MODEL, sums: FakeSums | None = None
) -> CudaExecutor:
    """Behind `pretend_h200`; config: of device "cpu" but for its types."""
    dtype = getattr(torch, config.dtype)
    get = quantizing(random_tensors(dtype, "cpu"), config.quantization, "cpu")
    decoder = Decoder(model, build_weights(model, get))
    decoder.reduce = sums
    sampler = Sampler(config.max_requests, model.vocab_size, eos_token_ids=())
    executor = CudaExecutor(config, decoder, sampler, device="cpu")
    _pretend(executor.attention)
    return executor


def _pretend(attention: GpuAttention) -> None:
    attention.capability, attention.pdl, attention.on_gpu = 90, True, True
    attention._find_gluon()
    attention._side, attention._fork, attention._join = Stream(), Event(), Event()
    attention._copied = [Event(), Event()]


class DriverDouble:
    """Triton's driver for an H200 that is not there: kernels compile, `loaded` gets their names."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.utils = SimpleNamespace(
            load_binary=self._load, get_device_properties=lambda device: {"max_shared_mem": 232448}
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: None

    def _load(self, name: str, *arguments: Any) -> tuple:
        self.loaded.append(name)
        return 1, 1, 0, 0, 1024  # module, function, registers, spills, threads of a block


@contextlib.contextmanager
def driver_double() -> Iterator[DriverDouble]:
    made, before = DriverDouble(), driver._active
    driver.set_active(made)
    try:
        yield made
    finally:
        driver._active = before
