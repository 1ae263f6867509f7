"""GraniKV's cache manager behind the replay's interface.

A request's prompt is written in one step, its output's slots are taken at admission and dropped
at its end, as the baseline does, so both hold the same tokens. The clock counts operations.
"""

from __future__ import annotations

import numpy as np

from granikv.bench.cache import ReplayConfig, make_request
from granikv.cache.manager import Admission, CacheManager
from granikv.config import EngineConfig
from granikv.core import Request, RequestRow


class ManagedCache:
    """prefix_layout: as EngineConfig's; "uniform" is our own paged cache."""

    def __init__(self, config: ReplayConfig, prefix_layout: str = "asymmetric"):
        self.manager = CacheManager(
            EngineConfig(
                capacity_tokens=config.capacity_tokens,
                max_requests=config.max_running,
                min_extent_tokens=config.min_extent_tokens,
                prefix_layout=prefix_layout,
            )
        )
        self._requests: dict[int, Request] = {}
        self._outputs: dict[int, list[int]] = {}
        self._clock = 0

    def admit(self, key: int, prompt: np.ndarray, output_length: int) -> int | None:
        self._clock += 1
        manager, now = self.manager, float(self._clock)
        request = self._requests.get(key)
        if request is None:
            request = make_request(key, prompt, output_length)
            self._outputs[key], request.output_token_ids = request.output_token_ids, []
            self._requests[key] = request
            manager.register(request, now)
        request.row = RequestRow(0)
        if manager.try_admit(request, now, reserve=output_length) is not Admission.ADMITTED:
            request.row = None
            return None
        cached = request.num_computed
        manager.allocate(request, cached, request.prompt_len - cached)
        manager.publish(request, request.prompt_len)
        request.output_token_ids = self._outputs.pop(key)
        manager.allocate(request, request.prompt_len, output_length)
        self._step()
        return cached

    def finish(self, key: int) -> None:
        request = self._requests.pop(key)
        request.last_token_time = float(self._clock)
        self.manager.publish(request, request.num_tokens)
        self.manager.release(request, keep=False)
        self._step()

    def _step(self) -> None:
        """A step of nothing but this operation: moves are done, retired slots come free."""
        self.manager.plan_moves()
        self.manager.take_slot_writes()
        self._clock += 1
        self.manager.step_launched(self._clock)
        self.manager.step_completed(self._clock)
