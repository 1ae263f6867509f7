"""AllReduce in its whole life with a communicator of one rank: the output is the input, bit for bit.

On a GPU with NCCL itself; elsewhere with doubles of the driver and of NCCL, so that the host's
side of the GPU test is known to work before a GPU is at hand.
"""

from __future__ import annotations

import ctypes.util
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.support import ON_GPU
from tests.plugin.plugin_support import raw, run_host

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NCCL = "libnccl.so.2"


def check(host, library, folder: Path, element: str, rows: int, env: dict[str, str]) -> str:
    """Output of the host; the tensor is [rows, 32]."""
    given = raw(torch.randn(rows, 32, dtype=TYPES[element]))
    (folder / "in.bin").write_bytes(given)
    said = run_host(host, library, "reduce_alone", element, rows, folder, env=env)
    for name in ("out.bin", "out_graph.bin"):
        assert (folder / name).read_bytes() == given, f"{name} differs from in.bin"
    return said


@pytest.mark.skipif(ON_GPU, reason="with doubles of driver and NCCL; see the next test")
@pytest.mark.parametrize("element", TYPES)
def test_one_rank_on_doubles(element, host, library, fake_cuda, fake_nccl, tmp_path):
    env = {**os.environ, "LD_LIBRARY_PATH": f"{fake_cuda}:{fake_nccl}", "FAKE_NCCL_COPY": "1"}
    said = check(host, library, tmp_path, element, 5, env)
    assert len(said.splitlines()) == 2  # eager and captured; none in the build phase
    assert check(host, library, tmp_path, element, 0, env) == ""
    del env["FAKE_NCCL_COPY"]
    with pytest.raises(AssertionError, match="out.bin differs"):
        check(host, library, tmp_path, element, 5, env)


def nccl_environment() -> dict[str, str]:
    """The environment in which the loader finds NCCL; skips, saying how to get it, without one."""
    own = os.environ.get("LD_LIBRARY_PATH", "")
    for place in sys.path:  # torch's CUDA builds bring it as a package
        folder = Path(place, "nvidia", "nccl", "lib")
        if (folder / NCCL).is_file():
            return {**os.environ, "LD_LIBRARY_PATH": f"{folder}:{own}"}
    if ctypes.util.find_library("nccl") is None:
        pytest.skip(
            f"{NCCL} is missing: pip install nvidia-nccl-cu13, or put one on the loader's path"
        )
    return dict(os.environ)


@pytest.mark.skipif(not ON_GPU, reason="needs one NVIDIA GPU and NCCL")
@pytest.mark.parametrize("element", TYPES)
@pytest.mark.parametrize("rows", [1, 257])
def test_one_rank_with_nccl_on_a_gpu(element, rows, host, library, tmp_path):
    check(host, library, tmp_path, element, rows, nccl_environment())
