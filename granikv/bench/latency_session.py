"""What the latency cases share: lengths, one engine of ours, prompts nobody used, the probe."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from granikv.bench.decode_contenders import EngineContender
from granikv.bench.harness import probe
from granikv.bench.streams import tokens_needed
from granikv.bench.timed_engine import RequestTimes, TimedEngine
from granikv.bench.workloads import shared_prefix_prompts
from granikv.config import ModelConfig


@dataclass(frozen=True)
class LatencyConfig:
    """Lengths in tokens; a prompt is a prefix and, as its last suffix_len tokens, a suffix."""

    prompt_len: int = 16384
    suffix_len: int = 128
    together: int = 16  # requests that arrive at once with one prefix
    batch: int = 32  # requests that decode while a prompt is prefilled
    streams: int = 256
    steps: int = 128
    repeats: int = 3
    chunks: tuple[int, ...] = ()  # prefill pieces tried; none: the engine's own

    @property
    def prefix_len(self) -> int:
        return self.prompt_len - self.suffix_len

    @property
    def max_seq_len(self) -> int:
        return self.prompt_len + tokens_needed(self.steps)

    @property
    def capacity_tokens(self) -> int:
        """Enough for every case without eviction of a prefix in use."""
        decoding = max(self.streams, self.batch, self.together)
        per_request = self.suffix_len + tokens_needed(self.steps) + 32
        return 4 * self.prompt_len + decoding * per_request + 4096


class Session:
    """One engine for all cases. settings: fields of EngineConfig; progress is told what runs."""

    def __init__(self, config: LatencyConfig, settings: dict, progress: Callable[[str], None]):
        self.config, self.settings, self.progress = config, settings, progress
        progress("loading")
        self.ours = EngineContender("granikv", prefix_layout="asymmetric", **settings)
        self.model: ModelConfig = self.ours.engine.model_config
        self._seeds = count()
        self._probe: dict | None = None

    def probe(self) -> dict:
        """Measured when it is first needed: right after the prefills, where there are some."""
        if self._probe is None:
            self._probe = machine_probe()
        return self._probe

    def prompts(self, number: int) -> list[list[int]]:
        """`number` prompts that share a prefix nobody used before."""
        lens = self.config.prefix_len, self.config.suffix_len
        return shared_prefix_prompts((number,), *lens, self.model.vocab_size, next(self._seeds))

    def params(self, batch: int, **more: object) -> dict:
        engine = self.ours.engine.config
        return {
            "model": Path(engine.model).name if engine.model else "embedded",
            "tp": engine.tp,
            "batch": batch,
            "prefix_len": self.config.prefix_len,
            "suffix_len": self.config.suffix_len,
            "group_sizes": [batch],
            "dtype": engine.dtype,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
        } | more

    def close(self) -> None:
        self.ours.close()


def machine_probe() -> dict:
    """The harness's; on a GPU by device events and of random values: products of ones run faster."""
    if not torch.cuda.is_available():
        return probe()
    from granikv.bench.gpu_timing import gpu_probe

    return gpu_probe()


def release_gpu_memory() -> None:
    """Give what ended engines held back to the device, for another process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def start_decoding(
    timed: TimedEngine, prompts: list[list[int]], num_steps: int
) -> list[RequestTimes]:
    """All prompts' requests, once each has a token; they decode for num_steps steps and more."""
    requests = [timed.add(prompt, tokens_needed(num_steps)) for prompt in prompts]
    timed.run_until(lambda: all(request.token_s for request in requests))
    return requests
