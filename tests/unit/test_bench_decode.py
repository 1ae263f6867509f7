"""The decode benchmark on a tiny model: who takes part, what is compared, what is reported."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import make_tiny_hf

from granikv.attention.plan_cutter import PlanCutter
from granikv.attention.variants import AttentionShape
from granikv.bench import decode as bench
from granikv.bench.decode_contenders import EngineContender
from granikv.bench.decode_plot import check_waterfall, plot_waterfall, waterfalls
from granikv.bench.fixed_dispatch import FixedDispatcher
from granikv.errors import InvalidArgument


def test_standard_workloads_are_the_issues_shapes():
    by_name = {w.name: w for w in bench.standard_workloads()}
    levels = by_name["two-levels-2048-1024"]
    prompts = levels.prompts(0, 1000)
    assert len(prompts) == 16 and {len(p) for p in prompts} == {2048 + 1024 + 64}
    assert len({tuple(p[:2048]) for p in prompts}) == 1
    assert len({tuple(p[:3072]) for p in prompts}) == 4
    assert len({tuple(p) for p in prompts}) == 16
    groups = by_name["four-groups-1024-4096"]
    assert sorted({len(p) - 64 for p in groups.prompts(0, 1000)}) == [1024, 2048, 3072, 4096]
    assert groups.params(None, 4)["group_sizes"] == [4, 4, 4, 4]


def test_prefixes_stay_and_suffixes_change_between_rounds():
    workload = bench.shared(3, 20, 5)
    one, two = workload.prompts(0, 500), workload.prompts(1, 500)
    assert one == workload.prompts(0, 500)
    assert all(a[:20] == b[:20] and a[20:] != b[20:] for a, b in zip(one, two, strict=True))


def test_all_contenders_run_in_turns_and_agree(tmp_path):
    folder = make_tiny_hf(tmp_path)
    (folder / "tokenizer.json").write_text(_word_tokenizer())
    told = []
    cases = bench.run_decode_bench(
        [bench.shared(3, 40, 6), bench.shared(2, 0, 9)], 4, 2, str(folder), progress=told.append
    )
    pairs = [(c.case, c.metrics["contender"], c.baseline) for c in cases]
    assert pairs == [
        ("shared-40", "granikv", "uniform-paging"),
        ("shared-40", "granikv", "transformers"),
        ("shared-40 (baseline itself)", "uniform-paging", "transformers"),
        ("shared-0", "granikv", "uniform-paging"),
        ("shared-0", "granikv", "transformers"),
        ("shared-0 (baseline itself)", "uniform-paging", "transformers"),
    ]
    order = [text.split()[-1] for text in told if text.startswith("shared-40")]
    assert order[3:] == ["granikv", "uniform-paging", "transformers",
                         "transformers", "granikv", "uniform-paging"]  # fmt: skip
    for case in cases:
        for metrics in (case.metrics, case.baseline_metrics):
            assert metrics["same_tokens"] + metrics["near_ties"] == metrics["answers"]
            assert metrics["step_ms_min"] <= metrics["step_ms"] <= metrics["step_ms_max"]
        assert case.metrics["ratio_min"] <= case.ratio <= case.metrics["ratio_max"]
        assert case.metrics["pairs"] == 2


def test_engines_share_weights_and_take_a_few_steps_in_turns(tmp_path, monkeypatch):
    folder = make_tiny_hf(tmp_path)
    (folder / "tokenizer.json").write_text(_word_tokenizer())
    turns, decoders, run = [], set(), EngineContender.run

    def noted(self, num_steps):
        turns.append((self.name, num_steps))
        decoders.add(self.engine.executor.decoder)
        assert self.engine._launched is None or self.engine._launched.handle.done()
        elapsed_s = run(self, num_steps)
        assert self.engine._launched.handle.done(), "it would run in the other engine's time"
        return elapsed_s

    monkeypatch.setattr(EngineContender, "run", noted)
    bench.run_decode_bench([bench.shared(2, 40, 6)], 8, 1, str(folder), with_transformers=False)
    ours, other = "granikv", "uniform-paging"
    once = [(ours, 4), (other, 4), (other, 3), (ours, 3)]
    assert turns == 2 * once and len(decoders) == 1


@pytest.mark.parametrize("steps,rounds,name", [(1, 2, "steps"), (4, 0, "rounds")])
def test_counts_that_measure_nothing_are_refused(steps, rounds, name):
    with pytest.raises(InvalidArgument, match=name):
        bench.run_decode_bench([bench.shared(1, 0, 4)], steps, rounds)


def _word_tokenizer() -> str:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({"<unk>": 0, "a": 3}, unk_token="<unk>")).to_str()


def test_named_cases_are_all_with_that_name():
    chosen = bench.choose_workloads(bench.standard_workloads(), ["shared-64", "shared-4096"])
    assert [(w.name, w.batch) for w in chosen] == [
        ("shared-4096", 16), ("shared-64", 1), ("shared-64", 8), ("shared-64", 32),
    ]  # fmt: skip
    assert bench.choose_workloads(bench.standard_workloads(), []) == bench.standard_workloads()


def test_fixed_contenders_have_no_choice_and_agree(tmp_path, monkeypatch):
    folder = make_tiny_hf(tmp_path)
    settings = {"random_weights": True, "min_extent_tokens": 16, "profile": "default"}
    variants: dict[str, set] = {}
    run = EngineContender.run

    def noted(self, num_steps):
        elapsed_s = run(self, num_steps)
        counters = self.engine.counters
        variants[self.name] = {
            v for v in ("cascade", "gemm", "flat") if counters[f"groups_{v}"] > 0
        }
        return elapsed_s

    monkeypatch.setattr(EngineContender, "run", noted)
    cases = bench.run_decode_bench(
        [bench.shared(3, 40, 6)], 4, 2, str(folder), False, engine_settings=settings,
        others=["no-dispatcher", "flat-extents"],
    )  # fmt: skip
    assert [c.baseline for c in cases] == ["no-dispatcher", "flat-extents", "uniform-paging"]
    assert variants["flat-extents"] == {"flat"} and variants["no-dispatcher"] == {"cascade"}
    assert variants["uniform-paging"] == set()
    for case in cases:
        assert case.metrics["same_tokens"] == case.metrics["answers"] == 6
        assert case.baseline_metrics["same_tokens"] == 6
    (panel,) = waterfalls({"gpu": "", "cases": [vars(case) for case in cases]})
    by_name = {case.baseline: case.baseline_metrics["step_ms"] for case in cases}
    assert panel.step_ms == (
        by_name["uniform-paging"], by_name["flat-extents"], by_name["no-dispatcher"],
        cases[0].metrics["step_ms"],
    )  # fmt: skip
    assert panel.ratio == cases[2].ratio


def test_a_fixed_cascade_keeps_one_layout_on_a_gpu_and_flat_steps_keep_theirs():
    shape = AttentionShape(32, 8, 128, 2)
    cutter = PlanCutter(shape, 132, 65536)
    hot = np.array([[0, 64, 0, 4096, 0, 0, 0, 0]], np.int32)  # 256 stacked rows
    cold = np.array([[row, 1, 4096, 64, 4096, 0, 0, 0] for row in range(64)], np.int32)
    rows = np.arange(64, dtype=np.int32)
    engine = SimpleNamespace(
        dispatcher=SimpleNamespace(cutter=cutter, cost=None, window=None), cache=None
    )
    fixed = FixedDispatcher(engine, "cascade").cutter
    assert cutter.cut(hot, rows, cold, 64).layout.name in ("dense", "even")
    assert fixed.cut(hot, rows, cold, 64).layout.name == "mid"
    assert fixed.cut(hot[:0], rows[:0], cold, 64).layout.name == "flat"
    assert FixedDispatcher(engine, "flat").cutter is cutter


def test_a_waterfall_is_drawn_of_workloads_with_all_stages(tmp_path):
    def entry(case, batch, baseline, ours, other):
        return {
            "case": case, "params": {"batch": batch}, "baseline": baseline, "ratio": other / 3,
            "metrics": {"step_ms": ours, "contender": "granikv"},
            "baseline_metrics": {"step_ms": other},
        }  # fmt: skip

    stages = {"uniform-paging": 8.0, "flat-extents": 9.0, "no-dispatcher": 4.0}
    cases = [entry("long", 8, name, 2.0, ms) for name, ms in stages.items()]
    cases.append(entry("long", 16, "uniform-paging", 2.0, 8.0))
    record = {"gpu": "cpu", "cases": cases}
    assert waterfalls(record) == [("long, B=8", (8.0, 9.0, 4.0, 2.0), 8.0 / 3)]
    plot_waterfall(record, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(InvalidArgument, match="all of"):
        plot_waterfall({"gpu": "cpu", "cases": cases[-1:]}, tmp_path / "none.png")
    for others, file, words in (([], tmp_path / "a", "flat-extents"), (stages, None, "--json")):
        with pytest.raises(InvalidArgument, match=words):
            check_waterfall(list(others), file)
