"""Trace replay without a model: how many prompt tokens each cache finds stored.

Both caches see the same requests under the same clock: a request is admitted in order of arrival
as soon as it fits, lives for its output, then releases. It knows no kernel and no model; the
baseline is written here so that the comparison does not depend on another engine.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from granikv.bench.harness import Case
from granikv.bench.workloads import OUTPUT_TOKEN_BASE, Trace
from granikv.core import Request
from granikv.errors import ArenaExhausted, InvalidArgument
from granikv.sampling_params import SamplingParams

PAGE_TOKENS = 16


@dataclass(frozen=True)
class ReplayConfig:
    capacity_tokens: int = 262144
    max_running: int = 64
    token_s: float = 0.02  # a request lives output_length * token_s after its admission
    min_extent_tokens: int = 256


class PrefixCache(Protocol):
    """What a replay needs. `key` names a live request."""

    def admit(self, key: int, prompt: np.ndarray, output_length: int) -> int | None:
        """Tokens found stored; None: does not fit now. prompt: int32 [prompt_len]."""

    def finish(self, key: int) -> None:
        """Release the request; its prompt stays matchable until evicted."""


class LruPages:
    """Pages of 16 tokens; unreferenced pages are evicted least recently used, tail before head.

    A page is identified by its parent page and its tokens, compared for equality; only full pages
    are shared, and at least one token of a prompt is always computed.
    """

    def __init__(self, capacity_tokens: int, page_tokens: int = PAGE_TOKENS):
        self.page_tokens = page_tokens
        self.num_free = capacity_tokens // page_tokens
        self._page_of: dict[tuple[int, bytes], int] = {}  # (parent page, tokens) -> page
        self._key_of: dict[int, tuple[int, bytes]] = {}
        self._references: dict[int, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._live: dict[int, list[int]] = {}
        self._next_page = 1  # 0 is the root; ids are never used twice

    def admit(self, key: int, prompt: np.ndarray, output_length: int) -> int | None:
        size = self.page_tokens
        num_full = len(prompt) // size
        blobs = [prompt[i * size : (i + 1) * size].tobytes() for i in range(num_full)]
        matched, parent = [], 0
        for blob in blobs[: (len(prompt) - 1) // size]:
            page = self._page_of.get((parent, blob))
            if page is None:
                break
            matched.append(page)
            parent = page
        num_pages = -(-(len(prompt) + output_length) // size)
        num_new = num_pages - len(matched)
        num_idle = len(self._evictable) - sum(page in self._evictable for page in matched)
        if num_new > self.num_free + num_idle:
            return None
        for page in matched:
            self._references[page] = self._references.get(page, 0) + 1
            self._evictable.pop(page, None)
        pages = list(matched)
        for index in range(len(matched), num_pages):
            page = self._take_page()
            if index < num_full and (parent, blobs[index]) not in self._page_of:
                self._page_of[(parent, blobs[index])] = page
                self._key_of[page] = (parent, blobs[index])
            parent = page
            self._references[page] = 1
            pages.append(page)
        self._live[key] = pages
        return len(matched) * size

    def finish(self, key: int) -> None:
        for page in reversed(self._live.pop(key)):
            self._references[page] -= 1
            if self._references[page]:
                continue
            del self._references[page]
            if page in self._key_of:
                self._evictable[page] = None
            else:
                self.num_free += 1

    def _take_page(self) -> int:
        if self.num_free:
            self.num_free -= 1
        else:
            victim, _ = self._evictable.popitem(last=False)
            del self._page_of[self._key_of.pop(victim)]
        page = self._next_page
        self._next_page += 1
        return page


@dataclass
class ReplayResult:
    """Totals of one replay, in tokens."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    admitted: int = 0
    rejected: int = 0  # larger than the whole cache
    peak_running: int = 0
    queue_s: float = 0.0  # virtual seconds between arrival and admission, summed
    host_s: float = 0.0  # real seconds spent in the cache

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)

    def metrics(self) -> dict:
        return {
            "token_hit_rate": self.hit_rate,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "admitted": self.admitted,
            "rejected": self.rejected,
            "peak_running": self.peak_running,
            "mean_queue_s": self.queue_s / max(1, self.admitted),
            "host_us_per_request": self.host_s * 1e6 / max(1, self.admitted),
        }


def replay(trace: Trace, cache: PrefixCache, config: ReplayConfig) -> ReplayResult:
    """Run every request of the trace through `cache` in virtual time."""
    result = ReplayResult()
    running: list[tuple[float, int]] = []  # (end, key)
    now = 0.0
    for key, request in enumerate(trace.requests):
        if request.input_length + request.output_length >= config.capacity_tokens:
            result.rejected += 1
            continue
        now = max(now, request.timestamp_s)
        while running and running[0][0] <= now:
            _finish_first(cache, running, result)
        prompt = trace.prompt_token_ids(request)
        cached = None
        while cached is None:
            if len(running) < config.max_running:
                start = time.perf_counter()
                cached = cache.admit(key, prompt, request.output_length)
                result.host_s += time.perf_counter() - start
            if cached is None:
                if not running:
                    raise ArenaExhausted(
                        f"request {key} of {request.input_length} tokens does not fit an idle cache"
                        f" of {config.capacity_tokens} tokens"
                    )
                now = max(now, running[0][0])
                _finish_first(cache, running, result)
        result.admitted += 1
        result.prompt_tokens += request.input_length
        result.hit_tokens += cached
        result.queue_s += now - request.timestamp_s
        heapq.heappush(running, (now + request.output_length * config.token_s, key))
        result.peak_running = max(result.peak_running, len(running))
    while running:
        _finish_first(cache, running, result)
    return result


def _finish_first(
    cache: PrefixCache, running: list[tuple[float, int]], result: ReplayResult
) -> None:
    _, key = heapq.heappop(running)
    start = time.perf_counter()
    cache.finish(key)
    result.host_s += time.perf_counter() - start


def check_capacity(trace: Trace, config: ReplayConfig) -> None:
    """Raises InvalidArgument when not one request of the trace fits into the caches."""
    smallest = min(r.input_length + r.output_length for r in trace.requests)
    if smallest >= config.capacity_tokens:
        expected = f"at least {smallest + 1}: the smallest request of {trace.name} and a free slot"
        raise InvalidArgument("capacity_tokens", config.capacity_tokens, expected)


def run_cache_bench(trace: Trace, config: ReplayConfig) -> list[Case]:
    """GraniKV's cache against LRU pages on one trace. Raises InvalidArgument."""
    if config.max_running < 1:
        raise InvalidArgument("max_running", config.max_running, "at least 1")
    check_capacity(trace, config)
    from granikv.bench.granikv_cache import ManagedCache

    ours = replay(trace, ManagedCache(config), config)
    pages = replay(trace, LruPages(config.capacity_tokens), config)
    return [
        Case(
            case=trace.name,
            params={
                "requests": len(trace.requests),
                "block_tokens": trace.block_tokens,
                "capacity_tokens": config.capacity_tokens,
                "max_running": config.max_running,
                "token_s": config.token_s,
            },
            metrics=ours.metrics(),
            baseline="lru-pages",
            ratio=ours.hit_rate / pages.hit_rate if pages.hit_rate else 1.0,
            baseline_metrics=pages.metrics(),
        )
    ]


def make_request(key: int, prompt: np.ndarray, output_length: int) -> Request:
    """A request with its output already known: private ids above every block's."""
    request = Request(str(key), prompt, SamplingParams(max_tokens=output_length, temperature=0.0))
    base = OUTPUT_TOKEN_BASE + (key * 65536) % (2**30 - 2**26)
    request.output_token_ids = list(range(base, base + min(output_length, 65536)))
    return request
