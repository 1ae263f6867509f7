"""The one door to the KV cache: who owns which slots, what is shared, what is HOT.

A request registers its tokens on arrival (demand), is admitted when its missing tokens fit, gets
slots per chunk, publishes them at commit and is released at its end. The first request that needs
an unwritten node becomes its writer (the leader); others wait for publication.
It knows no tensors: data movement leaves as `Move`s of the step plan.
"""

from __future__ import annotations

import enum
import heapq

import numpy as np

from granikv.cache.arena import TokenArena
from granikv.cache.prefix_tree import Node, PrefixTree
from granikv.config import EngineConfig
from granikv.core import Move, Request
from granikv.errors import ArenaExhausted

# (row, first position, slots), or one row and position per slot
SlotWrite = tuple[int | np.ndarray, int | np.ndarray, np.ndarray]

# Part of the arena that decode steps evict at once: looking for what may go walks the tree, which
# each step of a full arena would do; so one in several does, for under 1% of what is cached.
EVICT_AHEAD = 128


class Admission(enum.Enum):
    ADMITTED = "admitted"
    WAIT_LEADER = "wait for the leader to publish"
    NO_SPACE = "not enough free or evictable slots"


class CacheManager:
    """Slots of one arena. Times are seconds of a monotonic clock, passed in by the caller."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.arena = TokenArena(config.capacity_tokens)
        self.tree = PrefixTree()
        self.allow_hot = config.prefix_layout == "asymmetric"
        self.slot_writes: list[SlotWrite] = []
        self.launched_step = -1
        self.completed_step = -1
        self._retiring: list[tuple[int, np.ndarray]] = []  # (step that may still use them, slots)
        self._num_retiring = 0
        self._promotable: dict[Node, None] = {}
        self._paths: dict[Request, tuple[int, list[Node]]] = {}
        self.counters = dict.fromkeys(
            ("evicted_tokens", "promotions", "moved_tokens", "extents", "extent_fallbacks"), 0
        )

    # --- demand -------------------------------------------------------------------------------

    def register(self, request: Request, now: float) -> None:
        """Index the known tokens as demand. On arrival, and again after a preemption."""
        namespace = request.namespace
        if not self.config.enable_prefix_caching:
            namespace = (*namespace[:3], f"private:{request.request_id}")
        leaf = self.tree.insert_path(namespace, request.token_ids())
        request.leaf, request.leaf_end = leaf, leaf.end
        self._paths.pop(request, None)
        for node in self.path(request):
            shared_recently = node.published and now - node.last_use < self.config.recency_window_s
            node.users += 1
            node.last_use = now
            if not node.is_hot and node.published and (node.users > 1 or shared_recently):
                self._promotable[node] = None
        if 0 < request.shared_prefix_len < request.prompt_len:
            self._declare(request)

    def _declare(self, request: Request) -> None:
        """Make the declared prefix end at a node's end."""
        for node in self.path(request):
            if node.start < request.shared_prefix_len < node.end:
                self.tree.split(node, request.shared_prefix_len - node.start)
                return

    def path(self, request: Request) -> list[Node]:
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

    def try_admit(self, request: Request, now: float) -> Admission:
        """Lock the path and claim its unwritten nodes. Changes nothing unless ADMITTED.

        The request must have its row. Sets num_computed to the reusable tokens; at least the
        last token is always computed.
        """
        path = self.path(request)
        cached, missing = 0, request.num_tokens
        for node in path:
            if not node.is_complete and node.writer is not None:
                return Admission.WAIT_LEADER
            cached += node.published
            if not node.is_complete:
                break
        missing -= cached
        for node in path:
            node.locks += 1
        if self.arena.num_free < missing + 1:
            self.evict(missing + 1 - self.arena.num_free)
        if self.arena.num_free < missing + 1:
            for node in path:
                node.locks -= 1
            return Admission.NO_SPACE
        self._claim(request, now)
        request.num_computed = request.num_published = min(cached, request.num_tokens - 1)
        self._write_cached_slots(request, cached)
        return Admission.ADMITTED

    def _claim(self, request: Request, now: float) -> None:
        for node in self.path(request):
            if 0 < node.published < len(node):
                self.tree.split(node, node.published)
        path = self.path(request)
        hot_from_end = self._hot_wanted(request, path)
        parent_is_hot = True
        for node, want_hot in zip(path, hot_from_end, strict=True):
            node.last_use = now
            if not node.is_complete:
                node.writer = request
                if want_hot and parent_is_hot:
                    self._reserve_extent(node)
            elif want_hot and not node.is_hot:
                self._promotable[node] = None
            parent_is_hot = parent_is_hot and node.is_hot

    def _hot_wanted(self, request: Request, path: list[Node]) -> list[bool]:
        """A shared node long enough, and each of its ancestors (short heads included)."""
        wanted, below = [], False
        for node in reversed(path):
            declared = node.end <= request.shared_prefix_len
            shared = node.users > 1 or declared
            below = self.allow_hot and (
                below or (shared and len(node) >= self.config.min_extent_tokens)
            )
            wanted.append(below)
        wanted.reverse()
        return wanted

    def _reserve_extent(self, node: Node) -> None:
        start = self.arena.allocate_extent(len(node))
        if start is None:  # fragmented: COLD serves it, correct and slower
            self.counters["extent_fallbacks"] += 1
            return
        node.extent, node.allocated = start, len(node)
        self.tree.version += 1
        self.counters["extents"] += 1

    def _write_cached_slots(self, request: Request, cached: int) -> None:
        assert request.row is not None
        for node in self.path(request):
            if node.slots is not None and node.published and node.start < cached:
                self.slot_writes.append((request.row, node.start, node.slots[: node.published]))

    # --- slots of a step ----------------------------------------------------------------------

    def allocate(self, request: Request, start: int, count: int) -> np.ndarray:
        """int32 [count]: the slots that positions [start, start + count) are appended to.

        A position that is already published (the recomputed last token) goes to the padding slot.
        Raises ArenaExhausted, taking nothing, if eviction cannot make room.
        """
        need = self._count_new(request, start, count)
        if need > self.arena.num_free:
            self.evict(need - self.arena.num_free)
        fresh = self.arena.allocate_slots(need)
        if start >= request.leaf_end:
            request.tail_slots.extend(fresh.tolist())
            self.slot_writes.append((request.row, start, fresh))  # type: ignore[arg-type]
            return fresh
        parts, used, end = [], 0, start + count
        for node in self.path(request):
            low, high = max(start, node.start), min(end, node.end)
            if low >= high:
                continue
            if high <= node.start + node.published:
                parts.append(np.full(high - low, self.arena.padding_slot, np.int32))
                continue
            if node.extent is not None:
                base = node.extent + low - node.start
                parts.append(np.arange(base, base + high - low, dtype=np.int32))
                continue
            if node.slots is None:
                node.slots = np.full(len(node), -1, np.int32)
            taken = fresh[used : used + high - low]
            used += high - low
            node.slots[low - node.start : high - node.start] = taken
            node.allocated = high - node.start
            self.slot_writes.append((request.row, low, taken))  # type: ignore[arg-type]
            parts.append(taken)
        if end > request.leaf_end:
            taken = fresh[used:]
            request.tail_slots.extend(taken.tolist())
            self.slot_writes.append((request.row, request.leaf_end, taken))  # type: ignore[arg-type]
            parts.append(taken)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def allocate_decodes(self, requests: list[Request], positions: np.ndarray) -> np.ndarray:
        """int32 [num_requests]: one slot each, for its next position, int32 [num_requests].

        Raises ArenaExhausted, taking nothing, if eviction cannot make room for all of them.
        """
        # a prompt whose last chunk is one token ends inside its own leaf: rare, one by one
        inside = [r for r in requests if r.num_computed < r.leaf_end]
        need = len(requests) - len(inside)
        need += sum(self._count_new(r, r.num_computed, 1) for r in inside)
        missing = need - self.arena.num_free
        if missing > 0:
            self.evict(max(missing, self.arena.capacity // EVICT_AHEAD))
        if need > self.arena.num_free:
            raise ArenaExhausted(f"decode slots: expected {need} free, got {self.arena.num_free}")
        if inside:
            return np.concatenate([self.allocate(r, r.num_computed, 1) for r in requests])
        slots = self.arena.allocate_slots(need)
        for request, slot in zip(requests, slots.tolist(), strict=True):
            request.tail_slots.append(slot)
        rows = np.fromiter((r.row for r in requests), np.int32, need)
        self.slot_writes.append((rows, positions, slots))
        return slots

    def _count_new(self, request: Request, start: int, count: int) -> int:
        if start >= request.leaf_end:
            return count
        need = max(start + count - request.leaf_end, 0)
        for node in self.path(request):
            if not node.is_hot and not node.is_complete:
                need += max(min(start + count, node.end) - max(start, node.start), 0)
        return need

    def publish(self, request: Request, upto: int) -> None:
        """Positions below `upto` are written: make them readable by others."""
        if request.num_published < request.leaf_end:
            for node in self.path(request):
                if node.writer is request:
                    node.published = max(node.published, min(upto, node.end) - node.start)
                    if node.is_complete:
                        node.writer = None
                        if node.users > 1 and not node.is_hot:
                            self._promotable[node] = None
        request.num_published = upto

    # --- promotion ----------------------------------------------------------------------------

    def plan_moves(self) -> list[Move]:
        """Promote shared COLD nodes within the budget; the next plan uses the new indices."""
        moves: list[Move] = []
        budget = self.config.max_move_tokens
        if not self._promotable or not self.allow_hot:
            self._promotable.clear()
            return moves
        for node in sorted(self._promotable, key=lambda n: n.start):
            long_enough = len(node) >= self.config.min_extent_tokens
            if node.is_hot or not node.published or node.users < 2 or not long_enough:
                del self._promotable[node]
                continue
            chain = [n for n in self.tree.path(node) if not n.is_hot]
            total = sum(len(n) for n in chain)
            if not all(n.is_complete for n in chain) or total > self.arena.num_free:
                continue
            if total > budget:
                if total > self.config.max_move_tokens:
                    del self._promotable[node]
                continue
            if all(self._promote(n, moves) for n in chain):
                budget -= total
            self._promotable.pop(node, None)
        return moves

    def _promote(self, node: Node, moves: list[Move]) -> bool:
        start = self.arena.allocate_extent(len(node))
        if start is None:
            self.counters["extent_fallbacks"] += 1
            return False
        assert node.slots is not None
        moves.append(Move(node.slots.copy(), start))
        self._retire(node.slots, self.launched_step + 1)
        node.extent, node.slots = start, None
        self.tree.version += 1
        self.counters["promotions"] += 1
        self.counters["moved_tokens"] += len(node)
        return True

    # --- release ------------------------------------------------------------------------------

    def release(self, request: Request, *, keep: bool = True) -> None:
        """End, cancel or preempt. The written part stays matchable; the rest is returned."""
        if request.leaf is None:
            return
        path = self.path(request)
        admitted = request.row is not None
        for node in path:
            node.users -= 1
            if admitted:
                node.locks -= 1
                node.reader_step = max(node.reader_step, self.launched_step)
            if node.writer is request:
                node.writer = None
                self._trim(node, len(node) - node.published, self.launched_step)
        if admitted:
            self._keep_tail(request, path, keep and self.config.enable_prefix_caching)
        leaf = request.leaf
        request.leaf = None
        self._paths.pop(request, None)
        request.tail_slots = []
        if not self.config.enable_prefix_caching:
            for node in reversed(path):
                self._trim(node, len(node), self.launched_step)
        self.tree.prune(leaf)

    def _keep_tail(self, request: Request, path: list[Node], keep: bool) -> None:
        slots = np.asarray(request.tail_slots, dtype=np.int32)
        written = max(min(request.num_published - request.leaf_end, len(slots)), 0)
        if not keep or not written or not path or not path[-1].is_complete:
            self._retire(slots, self.launched_step)
            return
        tokens = request.token_ids()[request.leaf_end : request.leaf_end + written]
        written = len(tokens)
        leaf = self.tree.extend_path(path[-1], tokens)
        self._retire(slots[written:], self.launched_step)
        parent_complete = True
        for node in self.tree.path(leaf)[len(path) :]:
            low = node.start - request.leaf_end
            mine = slots[low : low + len(node)]
            if node.allocated or node.writer is not None or not parent_complete:
                self._retire(mine, self.launched_step)  # stored by another request
            else:
                node.slots, node.allocated, node.published = mine.copy(), len(mine), len(mine)
                node.last_use = path[-1].last_use
                node.reader_step = self.launched_step
            parent_complete = node.is_complete
        self.tree.prune(leaf)

    def _trim(self, node: Node, count: int, step: int) -> int:
        """Give back up to `count` of the node's last tokens; returns how many were stored."""
        keep = min(max(len(node) - count, 0), node.allocated)
        freed = node.allocated - keep
        if freed:
            if node.extent is not None:
                low = node.extent + keep
                self._retire(np.arange(low, low + freed, dtype=np.int32), step)
            else:
                assert node.slots is not None
                self._retire(node.slots[keep : node.allocated], step)
            node.allocated, node.published = keep, min(node.published, keep)
            if not keep:
                node.extent = node.slots = None
            if node.users:  # else it is on no live request's path
                self.tree.version += 1
        return freed

    def evict(self, count: int) -> int:
        """Free at least `count` tokens of unlocked nodes if there are as many; returns how many.

        Leaves only, tail before head; least recently used first, waiting demand last.
        """
        heap: list[tuple[bool, float, int, Node]] = []

        def offer(node: Node) -> None:
            idle = node.locks == 0 and node.reader_step <= self.completed_step
            if idle and node.allocated and node.parent is not None and not node.has_stored_children:
                heapq.heappush(heap, (node.users > 0, node.last_use, id(node), node))

        for node in list(self.tree.nodes()):
            offer(node)
        freed = 0
        while heap and freed < count:
            node = heapq.heappop(heap)[3]
            stored = node.allocated
            unstored = len(node) - stored
            freed += self._trim(node, unstored + min(stored, count - freed), self.completed_step)
            parent = node.parent
            if not node.allocated and parent is not None:
                self.tree.prune(node)
                offer(parent)
        self.counters["evicted_tokens"] += freed
        self._collect()
        return freed

    # --- steps --------------------------------------------------------------------------------

    def _retire(self, slots: np.ndarray, step: int) -> None:
        if not len(slots):
            return
        if step <= self.completed_step:
            self.arena.free_slots(slots)
            return
        self._retiring.append((step, slots))
        self._num_retiring += len(slots)

    def _collect(self) -> None:
        if not self._retiring:
            return
        still = []
        for step, slots in self._retiring:
            if step <= self.completed_step:
                self.arena.free_slots(slots)
                self._num_retiring -= len(slots)
            else:
                still.append((step, slots))
        self._retiring = still

    def step_launched(self, step_id: int) -> None:
        self.launched_step = step_id

    def step_completed(self, step_id: int) -> None:
        """Every step up to `step_id` has finished: what they read may be reused."""
        self.completed_step = step_id
        self._collect()

    def drop_moves(self, moves: list[Move]) -> None:
        """A failed step may not have written these extents: forget them."""
        starts = {move.dst_start for move in moves}
        for node in list(self.tree.nodes()):
            if node.extent in starts and node.is_complete:
                self._trim(node, len(node), self.launched_step)

    def take_slot_writes(self) -> list[SlotWrite]:
        writes, self.slot_writes = self.slot_writes, []
        return writes

    # --- accounting ---------------------------------------------------------------------------

    def usage(self, running: list[Request]) -> dict[str, int]:
        """Tokens by state; they add up to the capacity (see check_conservation)."""
        cold = hot = reserved = pinned = 0
        for node in self.tree.nodes():
            if node.is_hot:
                hot += node.published
                reserved += node.allocated - node.published
                pinned += node.published if node.locks else 0
            else:
                cold += node.allocated
        cold += sum(len(r.tail_slots) for r in running)
        return {
            "free": self.arena.num_free,
            "cold": cold,
            "hot": hot,
            "reserved": reserved + 1,
            "retiring": self._num_retiring,
            "capacity": self.arena.capacity,
            "pinned": pinned,
        }

    def check_conservation(self, running: list[Request]) -> None:
        """free + cold + hot + reserved + retiring == capacity, else AssertionError."""
        u = self.usage(running)
        total = u["free"] + u["cold"] + u["hot"] + u["reserved"] + u["retiring"]
        assert total == u["capacity"], f"arena: expected {u['capacity']} slots, got {total}: {u}"
        assert u["pinned"] <= u["hot"], u
