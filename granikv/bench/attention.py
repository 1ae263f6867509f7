"""Decode attention of one layer on a GPU: GraniKV against its flat path, FlashInfer and SDPA.

Every case goes through the planner (splits.py) and GpuAttention; append is not timed, the
baselines have none. Floor: unique KV bytes over BANDWIDTH. Answers are checked in the same run.
FP8 KV is compared with KV in the queries' type, of the same run.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from granikv.attention.gpu import GpuAttention
from granikv.attention.splits import SplitPlan
from granikv.attention.variants import AttentionShape
from granikv.bench.attention_baselines import baselines
from granikv.bench.attention_step import (
    MAX_COLD_ITEMS,
    MAX_HOT_ITEMS,
    MAX_PARTIALS,
    MAX_ROWS,
    AttentionCase,
    BenchStep,
    standard_cases,
)
from granikv.bench.gpu_timing import Effort, baseline_ms, do_bench_ms, gpu_probe, steady_ms
from granikv.bench.harness import Case, result_record, write_json
from granikv.config import KV_CACHE_DTYPES, EngineConfig, ModelConfig
from granikv.core import PlanCapacities
from granikv.errors import InvalidArgument, Unavailable
from granikv.outputs import check_output_file

BANDWIDTH_BYTES_PER_S = 4.25e12  # read and copy rate that one H200 reached
NUM_LAYERS = 8  # of the steady graph: each case's KV leaves the L2 between replays


class AttentionBench:
    """Arenas of random KV for all cases; heads as in Llama-3.1-8B unless told otherwise."""

    def __init__(
        self,
        cases: Sequence[AttentionCase],
        shape: AttentionShape,
        dtype: torch.dtype,
        num_layers: int = NUM_LAYERS,
        storage: torch.Tensor | None = None,
    ):
        """dtype: of q, and of KV unless shape.fp8_kv. storage: random values for both arenas, in the
        type of KV, that other benches use as well; None: of its own. Raises Unavailable without a
        GPU."""
        if not torch.cuda.is_available():
            raise Unavailable("attention benchmark: expected a CUDA GPU, got none")
        self.shape, self.dtype, self.num_layers = shape, dtype, num_layers
        self.capacity = max(c.unique_tokens for c in cases) + 4096
        size = (2, num_layers, self.capacity, shape.num_kv_heads, shape.head_dim)
        if storage is None:
            kv_dtype = torch.float8_e4m3fn if shape.fp8_kv else dtype
            made = [torch.empty(size[1:], device="cuda", dtype=dtype).normal_() for _ in range(2)]
            self.k, self.v = (arena.to(kv_dtype) for arena in made)
        else:
            self.k, self.v = storage[: math.prod(size)].view(size)
        self.max_seq_len = max(c.longest for c in cases)
        self.config = ModelConfig(
            "llama", num_layers, 4096, 14336, shape.num_qo_heads, shape.num_kv_heads,
            shape.head_dim, 128256, self.max_seq_len,
        )  # fmt: skip
        request_slots = torch.zeros(MAX_ROWS, self.max_seq_len, dtype=torch.int32, device="cuda")
        capacities = PlanCapacities(
            MAX_ROWS, MAX_ROWS, MAX_HOT_ITEMS, 4 * MAX_ROWS, MAX_COLD_ITEMS, MAX_PARTIALS, 1, 1
        )
        self.attention = GpuAttention(
            self.config, self.k, self.v, request_slots, capacities, dtype=dtype
        )
        self.num_sms = self.attention.num_sms

    def load(self, case: AttentionCase, checked_rows: int = MAX_ROWS) -> BenchStep:
        """Put the case's slot lists and fresh queries on the device; so many rows, evenly taken, are
        compared with the reference, and all must be finite."""
        step = BenchStep(case, self.shape, self.capacity)
        lists = torch.from_numpy(step.request_slots)
        self.attention.request_slots[: lists.shape[0], : lists.shape[1]] = lists.cuda()
        heads = (case.batch, self.shape.num_qo_heads, self.shape.head_dim)
        self.q = torch.randn(heads, device="cuda", dtype=self.dtype)
        count = min(checked_rows, case.batch)
        self.checked = [i * case.batch // count for i in range(count)]
        self.want = step.reference(self.q, self.k[0], self.v[0], self.checked)
        return step

    def measure(
        self,
        step: BenchStep,
        split: SplitPlan,
        steady_only: bool = False,
        effort: Effort | None = None,
    ) -> dict:
        """Times and error of one split; raises ValueError when an answer is off by over 1%.

        effort: of steady_ms; None: all layers.
        """
        self.attention.prepare(step.plan(split), split.layout, capture=True)
        effort = effort or Effort(self.num_layers)

        def layer(i: int) -> torch.Tensor:
            return self.attention.attend(i, self.q)

        self.attention.out.fill_(float("nan"))
        got = layer(0).view(self.q.shape)
        error = float((got[self.checked].float() - self.want).norm() / self.want.norm())
        if not (error < 1e-2 and got.isfinite().all()):
            raise ValueError(f"{step.case.name}, {split.reason}: relative error {error}")
        metrics = {"steady_ms": steady_ms(layer, effort), "relative_error": error}
        if not steady_only:
            metrics["do_bench_ms"] = do_bench_ms(lambda: layer(0))
        floor = self.floor_ms(step.case)
        metrics |= {"floor_ms": floor, "percent_of_floor": 100 * floor / metrics["steady_ms"]}
        return metrics

    def floor_ms(self, case: AttentionCase) -> float:
        per_token = self.shape.kv_bytes_per_token * self.shape.num_kv_heads
        return case.unique_tokens * per_token / BANDWIDTH_BYTES_PER_S * 1e3


def run_attention_bench(
    cases: Sequence[AttentionCase] | None = None,
    with_baselines: bool = True,
    progress: Callable[[str], None] = lambda text: None,
    fp8_kv: bool = False,
) -> tuple[list[Case], dict]:
    """One entry per case and baseline, and the probe of this run.

    ratio is of do_bench_ms, above 1 when GraniKV is faster. fp8_kv: the baseline is the same with
    KV in bfloat16, and the only one. Raises Unavailable without a GPU.
    """
    shape, dtype = AttentionShape(32, 8, 128, 2, fp8_kv=fp8_kv), torch.bfloat16
    cases = list(cases or standard_cases())
    bench = AttentionBench(cases, shape, dtype)
    wide = AttentionBench(cases, replace(shape, fp8_kv=False), dtype) if fp8_kv else None
    probe, entries = gpu_probe(), []
    for case in cases:
        step, ours = _planned(bench, case)
        progress(f"{case.name}: {ours}")
        others: list[tuple[str, dict]] = []
        if wide is not None:
            others.append(("bfloat16-kv", _planned(wide, case)[1]))
            progress(f"  bfloat16 KV: {others[0][1]}")
        elif with_baselines:
            flat = bench.measure(step, step.flat_split(bench.num_sms, MAX_PARTIALS))
            others.append(("uniform-paging", flat))
            for name, call, extra in baselines(case, shape, dtype):
                others.append((name, {"do_bench_ms": baseline_ms(call), **extra}))
            progress(f"  {[(n, round(m['do_bench_ms'], 4)) for n, m in others]}")
        params = {
            "model": "one layer",
            "tp": 1,
            "batch": case.batch,
            "prefix_len": [n for n, _ in case.groups],
            "suffix_len": case.suffix_len,
            "group_sizes": [size for _, size in case.groups],
            "num_qo_heads": shape.num_qo_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "dtype": "bfloat16",
            "kv_dtype": "float8_e4m3fn" if fp8_kv else "bfloat16",
        }
        for name, metrics in others or [("", {})]:
            ratio = metrics.get("do_bench_ms", 0.0) / ours["do_bench_ms"]
            entries.append(Case(case.name, params, ours, name, ratio, metrics))
    return entries, probe


def _planned(bench: AttentionBench, case: AttentionCase) -> tuple[BenchStep, dict]:
    """The case as the planner cuts it: its step, and what was measured."""
    step = bench.load(case)
    split = step.split(bench.num_sms, MAX_PARTIALS)
    return step, bench.measure(step, split) | {
        "layout": split.layout.name,
        "reason": split.reason,
    }


def choose_cases(names: Sequence[str]) -> list[AttentionCase]:
    """All if no name is given. Raises InvalidArgument for a name that no case has."""
    cases = standard_cases()
    known = [case.name for case in cases]
    for name in names:
        if name not in known:
            raise InvalidArgument("--case", name, f"one of {known}")
    return [case for case in cases if not names or case.name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="result file")
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument("--case", action="append", default=[], help="only this case; repeatable")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--commit", default="", help="the clean commit that is measured")
    args = parser.parse_args()
    cases = choose_cases(args.case)
    if args.json:
        check_output_file("--json", Path(args.json))
    entries, probe = run_attention_bench(
        cases,
        not args.no_baselines,
        lambda text: print(text, flush=True),
        EngineConfig(kv_cache_dtype=args.kv_cache_dtype).fp8_kv,
    )
    if args.json:
        record = result_record(entries, with_probe=False) | {"probe": probe}
        record["commit"] = args.commit or record["commit"]
        write_json(args.json, record)


if __name__ == "__main__":
    main()
