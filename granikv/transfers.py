"""Small arrays to a device and results back, without a wait for either side.

A copy between a GPU and pageable memory waits; here all memory is page-locked, of torch's caching
allocator, which keeps a block until the copy out of it has ended.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

DTYPES = {"f": torch.float64, "i": torch.int64}  # by numpy's kind; 8 bytes each


def to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """int64 or float64 arrays -> tensors of the same shapes on the device, by one copy."""
    for name, array in arrays.items():
        if array.dtype.kind not in DTYPES or array.dtype.itemsize != 8:
            raise TypeError(f"{name}: expected int64 or float64, got {array.dtype}")
    host = torch.empty(
        sum(array.size for array in arrays.values()),
        dtype=torch.int64,
        pin_memory=device.type == "cuda",
    )
    at, packed = 0, host.numpy()
    for array in arrays.values():
        packed[at : at + array.size] = np.ascontiguousarray(array).reshape(-1).view(np.int64)
        at += array.size
    sent, at, tensors = host.to(device, non_blocking=True), 0, {}
    for name, array in arrays.items():
        part = sent[at : at + array.size].view(DTYPES[array.dtype.kind])
        tensors[name] = part.view(array.shape)
        at += array.size
    return tensors


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, to be read when what is queued on the stream by now has ended."""
    host = torch.empty(
        tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda"
    )
    return host.copy_(tensor, non_blocking=True)
