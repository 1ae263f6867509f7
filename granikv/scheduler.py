"""Who runs in the next step: in-flight batching, chunked prefill, preemption, bounded overtaking.

It decides rows, never bytes: every slot comes from the CacheManager.
"""

from __future__ import annotations

import bisect

import numpy as np

from granikv.cache.manager import Admission, CacheManager
from granikv.config import EngineConfig
from granikv.core import Batch, NewRow, Request, RequestRow, ScheduledRequest, Status
from granikv.errors import ArenaExhausted

MAX_OVERTAKEN = 32  # admissions that may pass a request that does not fit: bounds its wait


class DrainNeeded(Exception):
    """Preemption must wait until the step in flight is committed."""


class Scheduler:
    def __init__(self, config: EngineConfig, cache: CacheManager):
        self.config = config
        self.cache = cache
        self.waiting: list[Request] = []  # by (priority descending, arrival)
        self.running: list[Request] = []  # by admission
        self.slots: dict[Request, np.ndarray] = {}  # slots of this step's rows
        self.new_rows: list[NewRow] = []  # requests admitted in this step
        self._free_rows = list(range(config.max_requests - 1, -1, -1))
        self.num_preemptions = 0

    def add(self, request: Request, now: float) -> None:
        self.cache.register(request, now)
        bisect.insort(self.waiting, request, key=lambda r: (-r.priority, r.arrival_time))

    def schedule(self, now: float, *, in_flight: bool) -> Batch:
        """Rows of the next step. Raises DrainNeeded if room needs a preemption while in flight."""
        self.slots, self.new_rows = {}, []
        batch = Batch([], [])
        budget = self._schedule_decodes(batch, in_flight)
        budget = self._schedule_prefills(batch, budget)
        self._admit(batch, budget, now)
        for scheduled in batch.scheduled:
            scheduled.request.num_computed += scheduled.num_tokens
            scheduled.request.num_scheduled_output += scheduled.samples
        return batch

    @staticmethod
    def _remaining(request: Request) -> int:
        return request.prompt_len + request.num_scheduled_output - request.num_computed

    def _schedule_decodes(self, batch: Batch, in_flight: bool) -> int:
        budget = self.config.max_num_batched_tokens
        for request in list(self.running):
            done = request.num_scheduled_output >= request.params.max_tokens
            if done or self._remaining(request) != 1 or budget == 0:
                continue
            if request.status is not Status.RUNNING:
                continue  # preempted for an earlier row of this step
            if not self._make_room(request, batch, in_flight):
                continue
            batch.decodes.append(ScheduledRequest(request, request.num_computed, 1, True))
            budget -= 1
        return budget

    def _make_room(self, request: Request, batch: Batch, in_flight: bool) -> bool:
        """Slots for one decode row, by preempting the youngest if need be."""
        while True:
            try:
                self.slots[request] = self.cache.allocate(request, request.num_computed, 1)
                return True
            except ArenaExhausted:
                if in_flight:
                    raise DrainNeeded from None
                victim = next(r for r in reversed(self.running) if r not in self.slots)
                self._preempt(victim, batch)
                if victim is request:
                    return False

    def _preempt(self, request: Request, batch: Batch) -> None:
        request.num_recomputed_tokens += request.num_computed
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.remove(request)
        request.status = Status.WAITING
        request.num_computed = request.num_published = 0
        request.num_scheduled_output = len(request.output_token_ids)
        batch.preempted.append(request)
        self.add(request, request.arrival_time)

    def _chunk(self, request: Request, batch: Batch, budget: int) -> int:
        """Schedule the next prefill chunk; returns its rows."""
        remaining = self._remaining(request)
        count = min(remaining, budget)
        while count:
            try:
                self.slots[request] = self.cache.allocate(request, request.num_computed, count)
                break
            except ArenaExhausted:
                count //= 2
        if count:
            batch.extends.append(
                ScheduledRequest(request, request.num_computed, count, count == remaining)
            )
        return count

    def _schedule_prefills(self, batch: Batch, budget: int) -> int:
        for request in self.running:
            if budget and self._remaining(request) > 1 and request not in self.slots:
                budget -= self._chunk(request, batch, budget)
        return budget

    def _admit(self, batch: Batch, budget: int, now: float) -> None:
        blocked: Request | None = None
        for request in list(self.waiting):
            if not budget or not self._free_rows:
                return
            if request in batch.preempted:
                continue
            request.row = RequestRow(self._free_rows[-1])
            verdict = self.cache.try_admit(request, now)
            if verdict is not Admission.ADMITTED:
                request.row = None
                if verdict is Admission.NO_SPACE and blocked is None:
                    blocked = request
                    if request.num_overtaken >= MAX_OVERTAKEN:
                        return
                continue
            self._free_rows.pop()
            self.waiting.remove(request)
            self.running.append(request)
            request.status = Status.RUNNING
            self.new_rows.append(
                NewRow(
                    request.row,
                    request.request_id,
                    request.params,
                    request.prompt_token_ids,
                    tuple(request.output_token_ids),
                )
            )
            if request.first_scheduled_time is None:
                request.first_scheduled_time = now
                request.num_cached_tokens = request.num_computed
            elif request.num_preemptions:
                request.num_recomputed_tokens -= request.num_computed
            if blocked is not None:
                blocked.num_overtaken += 1
            budget -= self._chunk(request, batch, budget)

    def remove(self, request: Request) -> None:
        """Take a finished, cancelled or preempted request out; its written KV stays cached."""
        self.cache.release(request)
        if request.row is not None:
            self.running.remove(request)
            self._free_rows.append(request.row)
            request.row = None
        else:
            self.waiting.remove(request)
