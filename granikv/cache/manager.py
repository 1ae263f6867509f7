"""The one door to the KV cache: who owns which slots, what is shared, what is HOT.

A request registers its tokens on arrival (demand), is admitted when its missing tokens fit, gets
slots per prefill piece, publishes them at commit and is released at its end. The first request
that needs an unwritten node becomes its writer (the leader); others wait for publication.
It knows no tensors: data movement leaves as `Move`s of the step plan.
"""

from __future__ import annotations

import enum

import numpy as np

from granikv.cache.compaction import Compactor
from granikv.cache.policy import HotPolicy
from granikv.cache.prefix_tree import Node
from granikv.cache.spans_in_use import SlotWrite, SpanInUse, spans_in_use
from granikv.cache.storage import NodeStorage
from granikv.config import EngineConfig
from granikv.core import Move, Request
from granikv.errors import ArenaExhausted


class Admission(enum.Enum):
    ADMITTED = "admitted"
    WAIT_LEADER = "wait for the leader to publish"
    NO_SPACE = "not enough free or evictable slots"


class CacheManager:
    """Slots of one arena. Times are seconds of a monotonic clock, passed in by the caller.

    With the uniform layout slots come in aligned pages of 16, only whole pages are shared and
    nothing is HOT; else the page is one token, and the rounding below changes nothing.
    """

    def __init__(self, config: EngineConfig):
        self.config = config
        self.page_tokens = config.page_tokens
        self.storage = NodeStorage(config.arena_tokens, config.page_tokens)
        self.arena, self.tree = self.storage.arena, self.storage.tree
        self.compactor = Compactor(self.storage, config.max_move_tokens, self._spans_in_use)
        self.policy = HotPolicy(config, self.storage, self.compactor)
        self.slot_writes: list[SlotWrite] = []
        self._admitted: dict[Request, int] = {}  # since the last plan: cached tokens
        self._now = 0.0  # the latest time a caller passed
        self._paths: dict[Request, tuple[int, list[Node]]] = {}

    @property
    def counters(self) -> dict[str, int]:
        """Since the start: evictions, moves, promotions, extents and fallbacks."""
        return {**self.storage.counters, **self.compactor.counters, **self.policy.counters}

    @property
    def max_request_tokens(self) -> int:
        """Longest prompt and output that can ever be admitted."""
        return self.arena.num_usable - 1

    # --- demand -------------------------------------------------------------------------------

    def register(self, request: Request, now: float) -> None:
        """Index the known tokens as demand. On arrival, and again after a preemption."""
        self._now = max(self._now, now)
        namespace = request.namespace
        if not self.config.enable_prefix_caching:
            namespace = (*namespace[:3], f"private:{request.request_id}")
        elif not request.num_preemptions:
            request.shared_prefix_len = self.policy.prefix_ids.declared_len(request)
        tokens = request.token_ids()
        leaf = self.tree.insert_path(namespace, tokens[: self.storage.whole_pages(len(tokens))])
        request.leaf, request.leaf_end = leaf, leaf.end
        self._paths.pop(request, None)
        self._cut_at_declared_end(request)
        path = self.path(request)
        self.policy.note_arrival(request, path, now)
        for node in path or [leaf]:  # a prompt shorter than a page holds on to the root
            node.users += 1
            node.last_use = now
            self.policy.offer(node)

    def _cut_at_declared_end(self, request: Request) -> None:
        """Make the declared prefix end at a node's end."""
        declared = self.storage.whole_pages(request.shared_prefix_len)
        for node in self.path(request):
            if node.start < declared < node.end:
                self.tree.split(node, declared - node.start)
                return

    def path(self, request: Request) -> list[Node]:
        """The request's nodes from position 0 on; its tail follows at leaf_end."""
        cached = self._paths.get(request)
        if cached is not None and cached[0] == self.tree.version:
            return cached[1]
        assert request.leaf is not None
        nodes = self.tree.path(request.leaf)
        self._paths[request] = (self.tree.version, nodes)
        return nodes

    def hot_path(self, request: Request) -> list[Node]:
        """HOT nodes of a running request, in position order; all that follows them is COLD."""
        nodes = []
        for node in self.path(request):
            if not node.is_hot:
                break
            nodes.append(node)
        return nodes

    # --- admission ----------------------------------------------------------------------------

    def try_admit(self, request: Request, now: float, reserve: int = 1) -> Admission:
        """Lock the path and claim its unwritten nodes. Changes nothing unless ADMITTED.

        The request must have its row. Sets num_computed to the reusable tokens; at least the
        last token is always computed. reserve: tokens behind the known ones that must fit too.
        """
        self._now = max(self._now, now)
        path = self.path(request)
        cached = 0
        for node in path:
            if not node.is_complete and node.writer is not None:
                return Admission.WAIT_LEADER
            cached += node.published
            if not node.is_complete:
                break
        missing = self.storage.page_slots(request.num_tokens + reserve) - cached
        if not self.storage.make_room(missing, path):
            return Admission.NO_SPACE
        self.storage.lock(path)
        self._claim(request, now)
        reusable = min(cached, self.storage.whole_pages(request.num_tokens - 1))
        request.num_computed = request.num_published = reusable
        self._admitted[request] = cached
        return Admission.ADMITTED

    def _claim(self, request: Request, now: float) -> None:
        for node in self.path(request):
            if 0 < node.published < len(node):
                self.tree.split(node, node.published)
        path = self.path(request)
        for node in path:
            node.last_use = now
        self.policy.claim(path, request)

    # --- slots of a step ----------------------------------------------------------------------

    def allocate(self, request: Request, start: int, count: int) -> np.ndarray:
        """int32 [count]: the slots that positions [start, start + count) are appended to.

        A position that is already published (the recomputed end of a cached prompt) goes to the
        padding slot. A position asked for again keeps its slot.
        Raises ArenaExhausted, taking nothing, if eviction cannot make room.
        """
        end, storage = start + count, self.storage
        growing: list[tuple[Node, int]] = []  # node, what it will store
        need = 0
        in_tree = start < request.leaf_end
        if in_tree:
            for node in self.path(request):
                if node.is_hot or node.is_complete or node.start >= end:
                    continue
                upto = storage.page_slots(min(end, node.end) - node.start)
                if upto > node.allocated:
                    growing.append((node, upto))
                    need += upto - node.allocated
        tail_slots = storage.page_slots(max(end - request.leaf_end, 0))
        need += max(tail_slots - len(request.tail_slots), 0)
        if not storage.make_room(need):
            raise ArenaExhausted(f"slots: expected {need} free or evictable, got fewer")
        fresh = self.arena.allocate_slots(need)
        used = 0
        for node, upto in growing:
            more = upto - node.allocated
            storage.grow(node, upto, fresh[used : used + more])
            used += more
        request.tail_slots.extend(fresh[used:].tolist())
        parts = self._slots_in_tree(request, start, end) if in_tree else []
        if end > request.leaf_end:
            low = max(start - request.leaf_end, 0)
            slots = np.asarray(request.tail_slots[low : end - request.leaf_end], np.int32)
            self.slot_writes.append((request.row, request.leaf_end + low, slots))  # type: ignore[arg-type]
            parts.append(slots)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def allocate_decodes(self, requests: list[Request], positions: np.ndarray) -> np.ndarray:
        """int32 [num_requests]: one slot each, for its next position, int32 [num_requests].

        Raises ArenaExhausted if eviction cannot make room for all of them; what some of them
        already took inside their nodes is kept for the next call.
        """
        if not requests:
            return np.empty(0, np.int32)
        ends = np.fromiter((r.leaf_end for r in requests), np.int32, len(requests))
        if (positions < ends).any():  # a last prefill piece of one token: rare, one by one
            num_writes, parts = len(self.slot_writes), []
            try:
                for request, position in zip(requests, positions.tolist(), strict=True):
                    parts.append(self.allocate(request, position, 1))
            except ArenaExhausted:
                del self.slot_writes[num_writes:]  # the next call lists them again
                raise
            return np.concatenate(parts)
        offsets = (positions - ends).tolist()
        pairs = list(zip(requests, offsets, strict=True))
        lacking = [r for r, offset in pairs if offset >= len(r.tail_slots)]
        need = len(lacking) * self.page_tokens
        if not self.storage.make_room(need):
            raise ArenaExhausted(f"decode slots: expected {need} free or evictable, got fewer")
        pages = self.arena.allocate_slots(need).reshape(-1, self.page_tokens).tolist()
        for request, page in zip(lacking, pages, strict=True):
            request.tail_slots.extend(page)
        slots = np.array([r.tail_slots[offset] for r, offset in pairs], np.int32)
        rows = np.fromiter((r.row for r in requests), np.int32, len(requests))
        self.slot_writes.append((rows, positions, slots))
        return slots

    def _slots_in_tree(self, request: Request, start: int, end: int) -> list[np.ndarray]:
        """Slots of the positions [start, end) that lie in nodes, by node."""
        assert request.row is not None
        parts = []
        for node in self.path(request):
            low, high = max(start, node.start) - node.start, min(end, node.end) - node.start
            if low >= high:
                continue
            if high <= node.published:
                parts.append(np.full(high - low, self.arena.padding_slot, np.int32))
            elif node.extent is not None:
                parts.append(np.arange(node.extent + low, node.extent + high, dtype=np.int32))
            else:
                assert node.slots is not None
                parts.append(node.slots[low:high])
                self.slot_writes.append((request.row, node.start + low, parts[-1]))
        return parts

    def publish(self, request: Request, upto: int) -> None:
        """Positions below `upto` are written: make them readable by others, in whole pages."""
        if request.num_published < request.leaf_end:
            for node in self.path(request):
                if node.writer is request:
                    written = self.storage.whole_pages(min(upto, node.end) - node.start)
                    node.published = max(node.published, written)
                    if node.is_complete:
                        node.writer = None
                        self.policy.offer(node)
        request.num_published = upto

    def plan_moves(self) -> list[Move]:
        """Copies of the next step, at most max_move_tokens: compaction, then promotions."""
        self.policy.plan_promotions()
        moves, slot_writes = self.compactor.take()
        self.slot_writes += slot_writes
        return moves

    def _spans_in_use(self) -> list[SpanInUse]:
        running = [(r, self.path(r)) for r in self._paths if r.row is not None]
        return spans_in_use(running, self._admitted, self.storage.completed_step)

    # --- release ------------------------------------------------------------------------------

    def release(self, request: Request, *, keep: bool = True) -> None:
        """End, cancel or preempt. The written part stays matchable; the rest is returned."""
        if request.leaf is None:
            return
        path, leaf = self.path(request), request.leaf
        self._admitted.pop(request, None)
        admitted = request.row is not None
        self._now = max(self._now, request.last_token_time or 0.0)
        for node in path or [leaf]:
            node.users -= 1
            node.hinted = node.hinted and node.users > 0
            if admitted:
                node.last_use = self._now  # it was read until now
        if admitted:
            self.storage.unlock(path)
            for node in path:
                if node.writer is request:
                    node.writer = None
                    self.storage.trim(node, node.published)
            self._keep_tail(request, leaf, keep and self.config.enable_prefix_caching)
        if self.storage.window is not None and not self.storage.window.node.users:
            self.storage.drop_window()
        request.leaf = None
        self._paths.pop(request, None)
        request.tail_slots = []
        if not self.config.enable_prefix_caching:
            for node in reversed(path):
                self.storage.trim(node, 0)
        self.tree.prune(leaf)

    def _keep_tail(self, request: Request, leaf: Node, keep: bool) -> None:
        storage, step = self.storage, self.storage.launched_step
        slots = np.asarray(request.tail_slots, dtype=np.int32)
        written = min(request.num_published, request.num_tokens) - request.leaf_end
        written = storage.whole_pages(max(written, 0))
        if not keep or not written or not leaf.is_complete:
            storage.retire(slots, step)
            return
        tokens = request.token_ids()[request.leaf_end : request.leaf_end + written]
        end = self.tree.extend_path(leaf, tokens)
        storage.retire(slots[written:], step)
        parent_complete = True
        for node in self.tree.path(end):
            if node.start < request.leaf_end:
                continue
            low = node.start - request.leaf_end
            mine = slots[low : low + len(node)]
            if node.allocated or node.writer is not None or not parent_complete:
                storage.retire(mine, step)  # stored by another request
            else:
                storage.adopt(node, mine, self._now, request.tail_filled_step)
            parent_complete = node.is_complete
        self.tree.prune(end)

    def evict(self, count: int) -> int:
        """Free at least `count` unused slots if there are as many; returns how many."""
        return self.storage.evict(count)

    # --- steps --------------------------------------------------------------------------------

    def step_launched(self, step_id: int) -> None:
        self.storage.step_launched(step_id)

    def step_completed(self, step_id: int) -> None:
        """Every step up to `step_id` has finished: what they read may be reused."""
        self.storage.step_completed(step_id)

    def forget_moves(self, step_id: int) -> None:
        """A failed step may not have written what it was to move: forget it, split since or not."""
        self.storage.forget_moves(step_id)

    def take_slot_writes(self) -> list[SlotWrite]:
        """What the next step records in request_slots, after its moves were planned."""
        for request, cached in self._admitted.items():
            for node in self.path(request):
                if node.slots is not None and node.published and node.start < cached:
                    slots = node.slots[: node.published]
                    self.slot_writes.append((request.row, node.start, slots))  # type: ignore[arg-type]
        self._admitted = {}
        writes, self.slot_writes = self.slot_writes, []
        return writes

    # --- accounting ---------------------------------------------------------------------------

    def usage(self, running: list[Request]) -> dict[str, int]:
        """Tokens by state; they add up to the capacity (see check_conservation).

        reserved: the padding slot, slots behind the last whole page, and what is taken but not
        written yet: the rest of extents and of last pages.
        """
        cold = hot = pinned = 0
        reserved = self.arena.capacity - self.arena.num_usable
        for node in self.tree.nodes():
            if node.is_hot:
                hot += node.published
                reserved += node.allocated - node.published
                pinned += node.published if node.locks else 0
            elif node.writer is None:
                cold += node.allocated
            else:
                used = max(node.writer.num_computed - node.start, node.published)
                used = min(used, node.allocated)
                cold, reserved = cold + used, reserved + node.allocated - used
        for request in running:
            used = min(max(request.num_computed - request.leaf_end, 0), len(request.tail_slots))
            cold, reserved = cold + used, reserved + len(request.tail_slots) - used
        return {
            "free": self.arena.num_free,
            "cold": cold,
            "hot": hot,
            "reserved": reserved,
            "retiring": self.storage.num_retiring,
            "capacity": self.arena.capacity,
            "pinned": pinned,
        }

    def check_conservation(self, running: list[Request]) -> None:
        """free + cold + hot + reserved + retiring == capacity, else AssertionError."""
        u = self.usage(running)
        total = u["free"] + u["cold"] + u["hot"] + u["reserved"] + u["retiring"]
        assert total == u["capacity"], f"arena: expected {u['capacity']} slots, got {total}: {u}"
        assert u["pinned"] <= u["hot"], u
