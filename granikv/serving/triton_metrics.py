"""Triton metric families fed by the engine's stats and by finished requests.

stats keys are plain names (`running_requests`) or full ones with labels
(`nv_granikv_choices{path="gemm"}`). Plain names that the TensorRT-LLM dashboards know go to the
nv_trt_llm_* families as gauges as well; every key becomes nv_granikv_<key>, of the kind that the
engine declared. The inter-token latency is a histogram of the engine's, exported as the counters
of its buckets: one observation per token through Triton would cost more than the token's answer.
"""

from __future__ import annotations

import re
import threading
from typing import Any

from granikv.metrics import LATENCY_BOUNDS_S, Stats
from granikv.serving.wire import Output

REQUESTS = "nv_trt_llm_request_metrics"
BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
TRT_NAMES: dict[str, tuple[str, dict[str, str]]] = {
    "active_requests": (REQUESTS, {"request_type": "active"}),
    "max_requests": (REQUESTS, {"request_type": "max"}),
    "running_requests": (REQUESTS, {"request_type": "scheduled"}),
    "prefill_requests": (REQUESTS, {"request_type": "context"}),
    "waiting_requests": (REQUESTS, {"request_type": "waiting"}),
    "capacity_tokens": (BLOCKS, {"kv_cache_block_type": "max"}),
    "free_tokens": (BLOCKS, {"kv_cache_block_type": "free"}),
    "used_tokens": (BLOCKS, {"kv_cache_block_type": "used"}),
    "tokens_per_block": (BLOCKS, {"kv_cache_block_type": "tokens_per"}),
    "cached_tokens": (BLOCKS, {"kv_cache_block_type": "reused"}),
    "used_fraction": (BLOCKS, {"kv_cache_block_type": "fraction"}),
    "kv_bytes": ("nv_trt_llm_runtime_memory_metrics", {"memory_type": "kv_cache"}),
    "batch_size": (
        "nv_trt_llm_inflight_batcher_metrics",
        {"inflight_batcher_specific_metric": "micro_batch_id"},
    ),
}
SECONDS = list(LATENCY_BOUNDS_S)
TOKENS = [16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0]
HISTOGRAMS = {
    "nv_granikv_time_to_first_token_seconds": ("arrival to first token", SECONDS),
    "nv_granikv_queue_time_seconds": ("arrival to first scheduled", SECONDS),
    "nv_llm_input_token_len": ("prompt tokens of finished requests", TOKENS),
    "nv_llm_output_token_len": ("generated tokens of finished requests", TOKENS),
}
KEY = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?$")
LABEL = re.compile(r'(\w+)="?([^",]*)"?')


class TritonMetrics:
    """pb_utils.MetricFamily objects made on first use. Every call may come from any thread."""

    def __init__(self, pb_utils: Any):
        self.pb_utils = pb_utils
        self.lock = threading.Lock()
        self.families: dict[str, Any] = {}
        self.metrics: dict[tuple, Any] = {}
        self.last: dict[str, float] = {}
        self.histograms = {
            name: self._metric(name, text, "HISTOGRAM", {}, buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }

    def _metric(self, name: str, text: str, kind: str, labels: dict, buckets=None) -> Any:
        key = (name, *sorted(labels.items()))
        if key not in self.metrics:
            if name not in self.families:
                family_class = self.pb_utils.MetricFamily
                family_kind = getattr(family_class, kind)
                self.families[name] = family_class(name=name, description=text, kind=family_kind)
            more = {"buckets": buckets} if buckets else {}
            self.metrics[key] = self.families[name].Metric(labels=labels, **more)
        return self.metrics[key]

    def set_stats(self, stats: Stats) -> None:
        """Write what changed. Keys that are no metric name are skipped."""
        with self.lock:
            for key, value in stats.counters.items():
                self._write(key, float(value), is_counter=True)
            for key, value in stats.gauges.items():
                self._write(key, float(value), is_counter=False)

    def _write(self, key: str, value: float, is_counter: bool) -> None:
        previous = self.last.get(key)
        match = KEY.match(key)
        if value == previous or match is None:
            return
        self.last[key] = value
        name, labels = match[1], dict(LABEL.findall(match[2] or ""))
        if name in TRT_NAMES:
            trt_name, trt_labels = TRT_NAMES[name]
            self._metric(trt_name, trt_name, "GAUGE", trt_labels).set(value)
        if not name.startswith("nv_"):
            name = f"nv_granikv_{name}"
        text = name.removeprefix("nv_granikv_").replace("_", " ")
        if is_counter:
            metric = self._metric(name, text, "COUNTER", labels)
            metric.increment(max(0.0, value - (previous or 0.0)))
        else:
            self._metric(name, text, "GAUGE", labels).set(value)

    def observe_finished(self, output: Output) -> None:
        """Histograms of one finished request."""
        with self.lock:
            observe = self.histograms
            first = output.first_token_time
            observe["nv_llm_input_token_len"].observe(output.num_prompt_tokens)
            observe["nv_llm_output_token_len"].observe(output.num_output_tokens)
            if output.first_scheduled_time is not None:
                queued_s = output.first_scheduled_time - output.arrival_time
                observe["nv_granikv_queue_time_seconds"].observe(max(0.0, queued_s))
            if first is not None:
                ttft_s = max(0.0, first - output.arrival_time)
                observe["nv_granikv_time_to_first_token_seconds"].observe(ttft_s)
