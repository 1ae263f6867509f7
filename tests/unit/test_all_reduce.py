"""How sums over GPU ranks are chosen. The sums themselves need GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from granikv.config import EngineConfig, ModelConfig
from granikv.errors import InvalidArgument
from granikv.executor.all_reduce import (
    BUFFER_BYTES,
    GlooAllReduce,
    GpuAllReduce,
    ReduceTable,
    all_reduce_s,
    choose,
    missing_for_peers,
)
from granikv.gpu_cost_model import GpuCostModel, SumTimes

TABLE = ReduceTable(
    (1024, 65536, 2**20),
    {"nccl": [9.0, 9.0, 9.0], "two_shot": [2.0, 3.0, 10.0]},
)


def test_the_fastest_of_the_next_larger_size_is_taken():
    sizes = (64, 1024, 1088, 65536, 2**20, 2**22)
    expected = ["two_shot", "two_shot", "two_shot", "two_shot", "nccl", "nccl"]
    assert [choose("auto", TABLE, size, 4) for size in sizes] == expected


@pytest.mark.parametrize("num_bytes", [BUFFER_BYTES + 128, 72, 16])
def test_what_the_kernels_cannot_take_goes_by_nccl(num_bytes):
    """Too long, not aligned, and no equal parts for four ranks."""
    assert choose("two_shot", None, num_bytes, 4) == "nccl"
    assert choose("two_shot", None, 128, 4) == "two_shot"


def test_peers_need_access_both_ways_a_dtype_and_a_number_of_ranks():
    def one_way(first, second):
        return (first, second) != (3, 1)

    assert "3 cannot read 1" in missing_for_peers(4, torch.bfloat16, one_way)
    assert "got torch.float16" in missing_for_peers(4, torch.float16, one_way)
    assert "got 3" in missing_for_peers(3, torch.bfloat16, one_way)
    assert missing_for_peers(2, torch.bfloat16, one_way) == ""


def test_peers_are_left_alone_where_nccl_is_told_to(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert "NCCL_P2P_DISABLE" in missing_for_peers(2, torch.bfloat16, lambda a, b: True)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    assert missing_for_peers(2, torch.bfloat16, lambda a, b: True) == ""


def test_fused_sums_leave_the_rest_to_nccl():
    assert choose("fused", None, 1024, 2) == "nccl"
    reduce = GlooAllReduce()
    assert not reduce.fuses(1)


def measured(strategy: str, fused_rows: int) -> GpuAllReduce:
    """As ranks that have measured; rows of 512 bytes."""
    made = object.__new__(GpuAllReduce)
    made.strategy, made.table, made.fused_rows = strategy, TABLE, fused_rows
    made.fused_times_us = {8: [1.5, 9.0], 64: [2.5, 9.0], 256: [9.5, 9.0]}
    made.exchange = SimpleNamespace(own=torch.empty(2, 2, 256, 128, dtype=torch.float32))
    return made


def test_sum_times_are_those_of_what_a_message_goes_by():
    times = measured("auto", 64).sum_times
    assert times == SumTimes((8 * 512, 64 * 512, 65536, 2**20), (1.5, 2.5, 3.0, 9.0))
    assert times.us(100) == 1.5 and times.us(64 * 512) == 2.5 and times.us(49152) == 2.75
    assert times.us(2**21) == 18.0
    apart = measured("auto", 0)
    apart.exchange = None
    assert apart.sum_times == SumTimes(TABLE.sizes_bytes, (2.0, 3.0, 9.0))
    apart.table = None
    assert apart.sum_times is None


def test_a_step_can_be_bound_by_its_sums():
    model = ModelConfig("llama", 32, 4096, 14336, 16, 4, 128, 64128, 131072)
    cost = GpuCostModel.load(None, model, 2, "NVIDIA H200")
    assert [cost.label(rows, 100_000, 100_000) for rows in (8, 4096)] == ["memory", "compute"]
    cost.sum_times = SumTimes((65536, 2**20), (5.0, 9.0))  # 0.4 ms of 4.7
    assert [cost.label(rows, 100_000, 100_000) for rows in (8, 4096)] == ["memory", "compute"]
    cost.sum_times = SumTimes((65536, 2**20), (80.0, 150.0))  # a slow link
    assert [cost.label(rows, 100_000, 100_000) for rows in (8, 128)] == ["communication"] * 2


def test_all_reduce_kernels_are_known_by_name():
    times = [("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", 3.0), ("sm90_gemm", 90.0),
             ("void two_shot_all_reduce_kernel<...>", 2.0), ("ncclDevKernel_SendRecv", 7.0),
             ("rank_sum_norm_kernel", 4.0)]  # fmt: skip
    assert all_reduce_s(times) == pytest.approx(9e-6)


@pytest.mark.parametrize(
    "fields",
    [{"all_reduce": "ring"}, {"all_reduce": "fused"}, {"all_reduce": "fused", "tp": 2, "device": "cpu"},
     {"all_reduce": "two_shot", "tp": 2, "executor": "tensorrt", "engine_dir": "x", "plugin": "x"}],
)  # fmt: skip
def test_a_choice_that_would_change_nothing_is_refused(fields):
    with pytest.raises(InvalidArgument, match="all_reduce"):
        EngineConfig(**fields)
    assert EngineConfig(all_reduce="fused", tp=2).all_reduce == "fused"
