"""Counters, gauges and the histogram; the plan's log. No server, no timing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from granikv import plan_log
from granikv.core import Choice, Count
from granikv.errors import InvalidArgument
from granikv.metrics import ENGINE_COUNTERS, Histogram, Stats
from granikv.serving import wire
from granikv.serving.triton_metrics import TritonMetrics


def test_histogram_series_are_cumulative():
    histogram = Histogram("gap_seconds", (0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    assert histogram.counters() == {
        'gap_seconds_bucket{le="0.1"}': 2,
        'gap_seconds_bucket{le="1.0"}': 3,
        'gap_seconds_bucket{le="+Inf"}': 4,
        "gap_seconds_sum": pytest.approx(7.65),
        "gap_seconds_count": 4,
    }


def test_stats_travel_with_their_kinds():
    stats = Stats({"steps": 3.0}, {"active_requests": 1.0})
    report = wire.decode_report(wire.encode(wire.Batch(1, [], stats)))
    assert report.stats == stats and stats.merged() == {"steps": 3.0, "active_requests": 1.0}


class FakeTriton:
    """pb_utils' metric classes; `values` holds (kind, name, labels) -> value."""

    def __init__(self):
        outer, self.values = self, {}

        class Metric:
            def __init__(self, key):
                self.key = key
                outer.values.setdefault(key, 0.0)

            def increment(self, value):
                assert self.key[0] == "counter" and value >= 0
                outer.values[self.key] += value

            def set(self, value):
                assert self.key[0] == "gauge"
                outer.values[self.key] = value

            def observe(self, value):
                assert self.key[0] == "histogram"

        class MetricFamily:
            COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

            def __init__(self, name, description, kind):
                self.name, self.kind = name, kind

            def Metric(self, labels, buckets=None):  # noqa: N802
                return Metric((self.kind, self.name, tuple(sorted(labels.items()))))

        self.MetricFamily = MetricFamily


def test_triton_gets_counters_as_counters_whatever_their_name():
    triton = FakeTriton()
    metrics = TritonMetrics(triton)
    for i in (1, 2):
        counters = {name: float(i * 10) for name in ENGINE_COUNTERS}
        metrics.set_stats(Stats(counters, {"free_tokens": 7.0 - i, "made_up_total": float(i)}))
    kinds = {name: kind for kind, name, _ in triton.values}
    for name in ENGINE_COUNTERS:
        assert kinds[f"nv_granikv_{name.partition('{')[0]}"] == "counter"
    assert triton.values["counter", "nv_granikv_finished", (("reason", "stop"),)] == 20
    assert triton.values["gauge", "nv_granikv_free_tokens", ()] == 5
    assert triton.values["gauge", "nv_granikv_made_up_total", ()] == 2
    labels = (("kv_cache_block_type", "reused"),)
    assert triton.values["gauge", "nv_trt_llm_kv_cache_block_metrics", labels] == 20


def make_plan(choices, num_cold=0):
    counts = np.zeros(16, np.int32)
    counts[[Count.NUM_ROWS, Count.NUM_DECODE_ROWS, Count.NUM_COLD_ITEMS]] = 3, 3, num_cold
    return SimpleNamespace(
        step_id=5, counts=counts, choices=choices, moves=[], regime="memory",
        kv_tokens_read=100, kv_tokens_flat=300, predicted_us=42.0,
    )  # fmt: skip


def test_the_plan_log_shows_every_choice_with_its_reason():
    choices = [
        Choice(0, 512, 3, "gemm", "gemm: cascade 90 us, gemm 40 us", 40.0),
        Choice(512, 256, 2, "flat", "flat: cascade 9 us, flat 2 us", 2.0),
    ]
    text = "\n".join(plan_log.lines(make_plan(choices, num_cold=3)))
    assert "step 5: 3 decode rows" in text and "memory-bound" in text
    assert "prefix [0, 512) x 3 rows -> gemm: cascade 90 us, gemm 40 us" in text
    assert "prefix [512, 768) x 2 rows -> flat: cascade 9 us, flat 2 us" in text
    assert "cold: 3 private spans" in text
    assert "no HOT prefix" in plan_log.lines(make_plan([], num_cold=1))[-1]


def test_the_plan_log_is_off_unless_asked_for(monkeypatch):
    monkeypatch.delenv("GRANIKV_LOG_PLAN", raising=False)
    assert not plan_log.enabled()
    monkeypatch.setenv("GRANIKV_LOG_PLAN", "maybe")
    with pytest.raises(InvalidArgument, match="GRANIKV_LOG_PLAN"):
        plan_log.enabled()
