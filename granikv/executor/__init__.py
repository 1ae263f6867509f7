"""Executors run StepPlans; `make_executor` picks the one for a device."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from granikv.attention.variants import FIRST_WITH_FP8
from granikv.config import CPU_CAPACITY_TOKENS, DEVICES, EngineConfig
from granikv.errors import InvalidArgument, Unavailable

if TYPE_CHECKING:
    from granikv.models import Decoder
    from granikv.sampling import Sampler

DTYPES = {"cuda": ("bfloat16", "float16", "float32"), "cpu": ("float32",)}  # the usual one first


def resolve_device(config: EngineConfig) -> EngineConfig:
    """`config` with device and dtype decided: "auto" is the GPU where there is one, in bfloat16.

    On a CPU the arena's capacity is decided, too; on a GPU its executor does that.

    Raises Unavailable for device "cuda" without a GPU, InvalidArgument for an unknown name, a
    dtype, a kv_cache_dtype or a quantization that the device does not serve.
    """
    import torch

    if config.device not in DEVICES:
        raise InvalidArgument("device", config.device, f"one of {DEVICES}")
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise Unavailable(
            "device='cuda': torch sees no GPU; use device='cpu', or a CUDA build of torch"
        )
    dtype = config.dtype
    if dtype == "auto":
        dtype = DTYPES[device][0]
    if dtype not in DTYPES[device]:
        raise InvalidArgument("dtype", dtype, f"one of {('auto', *DTYPES[device])} on {device}")
    if config.fp8_kv:
        needs = "'auto' here: FP8 KV needs a GPU of compute capability"
        _check_fp8("kv_cache_dtype", config.kv_cache_dtype, needs, device)
    if config.quantization is not None and device == "cuda":
        needs = "None and a 16-bit checkpoint: FP8 weights need compute capability"
        _check_fp8("quantization", config.quantization, needs, device)
        if dtype != "bfloat16":
            expected = f"'bfloat16' or 'auto', with quantization={config.quantization!r}"
            raise InvalidArgument("dtype", dtype, expected)
    capacity = config.capacity_tokens
    if device == "cpu" and capacity is None:
        capacity = CPU_CAPACITY_TOKENS
    return dataclasses.replace(config, device=device, dtype=dtype, capacity_tokens=capacity)


def _check_fp8(field: str, value: str, needs: str, device: str) -> None:
    """Raises InvalidArgument where FP8 is nothing that the device converts and multiplies."""
    import torch

    needs = f"{needs} {FIRST_WITH_FP8 // 10}.{FIRST_WITH_FP8 % 10} or newer"
    if device != "cuda":
        raise InvalidArgument(field, value, f"{needs}, and this is device={device!r}")
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < FIRST_WITH_FP8:
        raise InvalidArgument(field, value, f"{needs}, and this one has {major}.{minor}")


def make_executor(config: EngineConfig, decoder: Decoder, sampler: Sampler) -> Any:
    """Executor for the device of a config that `resolve_device` returned."""
    if config.device == "cuda":
        from granikv.executor.cuda_executor import CudaExecutor

        executor = CudaExecutor(config, decoder, sampler)
        if config.warm_up:
            executor.warm_up()
        return executor
    from granikv.executor.torch_executor import TorchExecutor

    return TorchExecutor(config, decoder, sampler)
