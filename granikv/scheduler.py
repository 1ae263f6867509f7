"""Who runs in the next step: in-flight batching, chunked prefill, preemption, bounded overtaking.

It decides rows, never bytes: every slot comes from the CacheManager.
"""

from __future__ import annotations

import bisect

import numpy as np

from granikv.cache.manager import Admission, CacheManager
from granikv.config import EngineConfig
from granikv.core import Batch, NewRow, Request, RequestRow, ScheduledExtend, Status
from granikv.errors import ArenaExhausted

MAX_REFUSED = 8  # requests without room that one step tries: each try may walk the tree to evict
MAX_OVERTAKEN = 32  # admissions that may pass a request that does not fit: bounds its wait


class DrainNeeded(Exception):
    """Preemption must wait until the step in flight is committed."""


class Scheduler:
    def __init__(self, config: EngineConfig, cache: CacheManager):
        self.config = config
        self.cache = cache
        self.waiting: list[Request] = []  # by _order
        self.running: dict[Request, None] = {}  # a set, by admission
        self.running_version = 0  # changes with `running`
        self._free_rows = list(range(config.max_requests - 1, -1, -1))
        self.num_preemptions = 0

    @staticmethod
    def _order(request: Request) -> tuple[int, float]:
        return -request.priority, request.arrival_time

    def add(self, request: Request, now: float) -> None:
        self.cache.register(request, now)
        bisect.insort(self.waiting, request, key=self._order)

    def schedule(self, now: float, *, in_flight: bool) -> Batch:
        """Rows of the next step. Raises DrainNeeded if room needs a preemption while in flight.

        Then nothing has changed.
        """
        batch, prefills = self._schedule_decodes(in_flight)
        budget = self.config.max_num_batched_tokens - len(batch.decodes)
        for request in prefills:
            if budget:
                budget -= self._chunk(request, batch, budget)
        self._admit(batch, budget, now)
        for request in batch.decodes:
            request.num_computed += 1
            request.num_scheduled_output += 1
        for extend in batch.extends:
            extend.request.num_computed += extend.num_tokens
            extend.request.num_scheduled_output += extend.samples
        batch.running_version = self.running_version
        return batch

    def _schedule_decodes(self, in_flight: bool) -> tuple[Batch, list[Request]]:
        """The decode rows, with their slots; and the requests in mid-prefill."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running:
            made = request.num_scheduled_output
            remaining = len(request.prompt_token_ids) + made - request.num_computed
            if remaining > 1:
                prefills.append(request)
            elif remaining == 1 and made < request.params.max_tokens:
                decodes.append(request)
        del decodes[self.config.max_num_batched_tokens :]
        preempted: list[Request] = []
        while True:
            positions = np.fromiter((r.num_computed for r in decodes), np.int32, len(decodes))
            try:
                slots = self.cache.allocate_decodes(decodes, positions)
                break
            except ArenaExhausted:
                if in_flight:
                    raise DrainNeeded from None
            youngest = next(reversed(self.running))
            self._preempt(youngest)
            preempted.append(youngest)
            for requests in (decodes, prefills):
                if requests and requests[-1] is youngest:
                    requests.pop()
        return Batch(decodes, positions, slots, 0, preempted=preempted), prefills

    def _preempt(self, request: Request) -> None:
        request.num_recomputed_tokens += request.num_computed
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.remove(request)
        request.status = Status.WAITING
        request.num_computed = request.num_published = 0
        request.num_scheduled_output = len(request.output_token_ids)
        self.add(request, request.arrival_time)

    def _chunk(self, request: Request, batch: Batch, budget: int) -> int:
        """Schedule the next prefill chunk; returns its rows."""
        start = request.num_computed
        remaining = request.prompt_len + request.num_scheduled_output - start
        count = min(remaining, budget)
        while count:
            try:
                slots = self.cache.allocate(request, start, count)
            except ArenaExhausted:
                count //= 2
                continue
            batch.extends.append(ScheduledExtend(request, start, slots, count == remaining))
            break
        return count

    def _admit(self, batch: Batch, budget: int, now: float) -> None:
        blocked: Request | None = None
        num_refused = 0
        for request in list(self.waiting):
            if not budget or not self._free_rows:
                return
            if blocked is not None and blocked.num_overtaken >= MAX_OVERTAKEN:
                return
            if request in batch.preempted:
                continue
            request.row = RequestRow(self._free_rows[-1])
            verdict = self.cache.try_admit(request, now)
            if verdict is not Admission.ADMITTED:
                request.row = None
                if verdict is Admission.NO_SPACE:
                    num_refused += 1
                    blocked = blocked or request
                    if num_refused == MAX_REFUSED:
                        return
                continue
            self._free_rows.pop()
            self._leave_waiting(request)
            self.running[request] = None
            self.running_version += 1
            request.status = Status.RUNNING
            batch.new_rows.append(
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
            del self.running[request]
            self.running_version += 1
            self._free_rows.append(request.row)
            request.row = None
        else:
            self._leave_waiting(request)

    def _leave_waiting(self, request: Request) -> None:
        i = bisect.bisect_left(self.waiting, self._order(request), key=self._order)
        while self.waiting[i] is not request:  # others of the same priority and arrival
            i += 1
        del self.waiting[i]
