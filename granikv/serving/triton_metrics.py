"""Triton metric families fed by the engine's stats and by finished requests.

stats keys are plain names (`running_requests`) or full ones with labels
(`nv_granikv_choices{path="gemm"}`). Plain names that the TensorRT-LLM dashboards know go to the
nv_trt_llm_* families as well; every key becomes nv_granikv_<key>.
"""

from __future__ import annotations

import re
import threading
from typing import Any

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
COUNTER_WORDS = (
    "_total", "prompt_tokens", "output_tokens", "cached_tokens", "hot_tokens", "recomputed_tokens",
    "evictions", "promotions", "demotions", "moves", "preemptions", "bytes_read", "bytes_saved",
    "steps", "aborted", "finished", "fallback", "choices",
)  # fmt: skip
SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0]
TOKENS = [16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0]
HISTOGRAMS = {
    "nv_granikv_time_to_first_token_seconds": ("arrival to first token", SECONDS),
    "nv_granikv_inter_token_latency_seconds": ("mean gap between tokens of a request", SECONDS),
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

    def set_stats(self, stats: dict[str, float]) -> None:
        """Write what changed. Keys that are no metric name are skipped."""
        with self.lock:
            for key, value in stats.items():
                previous = self.last.get(key)
                match = KEY.match(key)
                if value == previous or match is None:
                    continue
                self.last[key] = value
                name, labels = match[1], dict(LABEL.findall(match[2] or ""))
                if name in TRT_NAMES:
                    trt_name, trt_labels = TRT_NAMES[name]
                    self._metric(trt_name, trt_name, "GAUGE", trt_labels).set(value)
                if not name.startswith("nv_"):
                    name = f"nv_granikv_{name}"
                text = name.removeprefix("nv_granikv_").replace("_", " ")
                if name.endswith(COUNTER_WORDS):
                    delta = value - (previous or 0.0)
                    if delta >= 0:
                        self._metric(name, text, "COUNTER", labels).increment(delta)
                else:
                    self._metric(name, text, "GAUGE", labels).set(value)

    def observe_finished(self, output: Output) -> None:
        """Histograms of one finished request."""
        with self.lock:
            observe = self.histograms
            first, last = output.first_token_time, output.last_token_time
            observe["nv_llm_input_token_len"].observe(output.num_prompt_tokens)
            observe["nv_llm_output_token_len"].observe(output.num_output_tokens)
            if output.first_scheduled_time is not None:
                queued_s = output.first_scheduled_time - output.arrival_time
                observe["nv_granikv_queue_time_seconds"].observe(max(0.0, queued_s))
            if first is None:
                return
            ttft_s = max(0.0, first - output.arrival_time)
            observe["nv_granikv_time_to_first_token_seconds"].observe(ttft_s)
            if last is not None and output.num_output_tokens > 1:
                gap_s = (last - first) / (output.num_output_tokens - 1)
                observe["nv_granikv_inter_token_latency_seconds"].observe(max(0.0, gap_s))
