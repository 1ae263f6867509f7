"""Where the KV of tree nodes lies: locking, growth, trimming, eviction, retirement of slots.

Slots given back while a launched step may still read them are *retiring* until it has finished.
It knows nodes, slots and steps; neither requests' progress nor what deserves an extent.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count as counter

import numpy as np

from granikv.cache.arena import TokenArena
from granikv.cache.prefix_tree import Node, PrefixTree
from granikv.cache.windows import cheapest_window

DEMAND_COST = 4.0  # of evicting a slot that a waiting request wants, beside 1 to 2 for any


class NodeStorage:
    """Arena and tree of one cache. page_tokens: COLD slots are taken in pages of that many."""

    def __init__(self, capacity: int, page_tokens: int):
        self.page_tokens = page_tokens
        self.arena = TokenArena(capacity, page_tokens)
        self.tree = PrefixTree(page_tokens)
        self.launched_step = -1
        self.completed_step = -1
        self.num_retiring = 0
        self._retiring: list[tuple[int, np.ndarray]] = []  # (step that may still use them, slots)
        self._num_evictable: int | None = 0  # None: count again
        self._newest_reader_step = -1  # of nodes that nobody locks
        self._victims: list[tuple[bool, float, int, Node]] = []  # heap, see evict
        self._victims_until = 0.0  # the latest use when the heap was made
        self._serial = counter()  # nodes of equal age leave in order of discovery
        self.counters = {"evicted_tokens": 0}

    def whole_pages(self, length: int) -> int:
        """`length` tokens rounded down to pages."""
        return length - length % self.page_tokens

    def page_slots(self, length: int) -> int:
        """Slots that `length` tokens occupy: rounded up to pages."""
        return length + -length % self.page_tokens

    # --- users --------------------------------------------------------------------------------

    def lock(self, nodes: Sequence[Node]) -> None:
        """Keep the nodes from eviction."""
        for node in nodes:
            node.locks += 1
        self._num_evictable = None

    def unlock(self, nodes: Sequence[Node]) -> None:
        """Undo one lock of each; steps launched so far may still read them."""
        for node in nodes:
            node.locks -= 1
            node.reader_step = max(node.reader_step, self.launched_step)
        self._newest_reader_step = self.launched_step
        self._num_evictable = None

    # --- growth -------------------------------------------------------------------------------

    def make_room(self, count: int, path: Sequence[Node] = ()) -> bool:
        """Evict, sparing `path`, until `count` slots are free.

        False, evicting nothing, when that is impossible: a request that does not fit must not
        empty the cache for nothing.
        """
        lacking = count - self.arena.num_free
        if lacking <= 0:
            return True
        spared = sum(node.allocated for node in path if self._is_idle(node))
        if self.num_evictable() - spared < lacking:
            return False
        if path:
            self.lock(path)
        self.evict(lacking)
        if path:
            for node in path:
                node.locks -= 1
            self._num_evictable = None
        return True

    def grow(self, node: Node, upto: int, slots: np.ndarray) -> None:
        """`slots` (int32) store the COLD node's tokens from `allocated` up to `upto`."""
        if node.slots is None:
            node.slots = np.full(len(node), -1, np.int32)
        node.slots[node.allocated : upto] = slots
        node.allocated = upto

    def adopt(self, node: Node, slots: np.ndarray, last_use: float) -> None:
        """A node without storage takes over written slots, int32 [len]."""
        node.slots, node.allocated, node.published = slots.copy(), len(slots), len(slots)
        node.last_use, node.reader_step = last_use, self.launched_step
        self._newest_reader_step = self.launched_step
        self._num_evictable = None

    def reserve_extent(self, node: Node) -> int | None:
        """First slot of a free extent for the node, evicting where that makes room for it.

        None: slots in use leave no run that is long enough. A COLD node's slots return when the
        step that copies them, the next one, has finished.
        """
        start = self.arena.allocate_extent(len(node))
        if start is None and self._clear_window(node):
            start = self.arena.allocate_extent(len(node))
        if start is None:
            return None
        if node.slots is not None:
            self.retire(node.slots[: node.allocated], self.launched_step + 1)
            node.reader_step = self._newest_reader_step = self.launched_step + 1  # its copy
        node.extent, node.slots, node.allocated = start, None, len(node)
        self.tree.version += 1
        self._num_evictable = None
        return start

    def _clear_window(self, node: Node) -> bool:
        """Evict what lies in the cheapest run of free and idle slots that holds the node."""
        if len(node) > self.arena.num_free + self.num_evictable():
            return False
        path: set[Node] = set()
        above: Node | None = node
        while above is not None:
            path.add(above)
            above = above.parent
        idle = [n for n in self.tree.nodes() if n.allocated and n not in path and self._is_idle(n)]
        newest = max((n.last_use for n in idle), default=0.0)
        oldest = min((n.last_use for n in idle), default=0.0)
        cost = np.full(self.arena.num_usable, np.inf)
        for first, end in self.arena.free_ranges():
            cost[first:end] = 0.0
        for other in idle:  # the newest counts twice the oldest, what somebody waits for 4 more
            age = (other.last_use - oldest) / (newest - oldest) if newest > oldest else 0.0
            cost[other.stored_slots()] = 1.0 + age + (DEMAND_COST if other.users else 0.0)
        start = cheapest_window(cost, len(node))
        if start is None:
            return False
        freed = 0
        for other in idle:
            freed += self._trim_out_of(other, start, start + len(node))
        self.counters["evicted_tokens"] += freed
        return True

    def _trim_out_of(self, node: Node, low: int, high: int) -> int:
        """Give back an idle node's part from its first slot in [low, high) on, and all below it."""
        slots = node.stored_slots()
        inside = np.flatnonzero((slots >= low) & (slots < high))
        if not len(inside):
            return 0
        freed = 0
        for below in list(self.tree.subtree(node)):
            freed += self.trim(below, int(inside[0]) if below is node else 0)
        for below in reversed(list(self.tree.subtree(node))):
            if not below.allocated:
                self.tree.prune(below)
        return freed

    # --- shrinking ----------------------------------------------------------------------------

    def trim(self, node: Node, keep: int) -> int:
        """Give back what is stored behind the first `keep` tokens; returns how many slots."""
        keep = self.whole_pages(min(keep, node.allocated))
        freed = node.allocated - keep
        if freed:
            if node.extent is not None:
                low = node.extent + keep
                slots = np.arange(low, low + freed, dtype=np.int32)
            else:
                assert node.slots is not None
                slots = node.slots[keep : node.allocated]
            if self._is_idle(node):  # last read by a finished step: its slots come free at once
                self.retire(slots, self.completed_step)
                if self._num_evictable is not None:
                    self._num_evictable -= freed
            else:
                self.retire(slots, self.launched_step)
            node.allocated, node.published = keep, min(node.published, keep)
            if not keep:
                node.extent = node.slots = None
            if node.users:  # else it is on nobody's path: what was derived from paths stays right
                self.tree.version += 1
        return freed

    def _is_idle(self, node: Node) -> bool:
        """An idle node's descendants are idle: they are unlocked with it or before it."""
        return node.locks == 0 and node.reader_step <= self.completed_step

    def num_evictable(self) -> int:
        """Slots that evict() can free now."""
        if self._num_evictable is None:
            self._num_evictable = sum(n.allocated for n in self.tree.nodes() if self._is_idle(n))
        return self._num_evictable

    def evict(self, count: int) -> int:
        """Free at least `count` slots of idle nodes if there are as many; returns how many.

        Leaves only, tail before head; least recently used first, waiting demand last. The heap
        of victims outlives the call, so that a full cache does not walk the tree for every
        token: what became idle since was used since, and waits until the older ones are gone.
        """
        freed, is_fresh = 0, False
        while freed < count:
            node = self._oldest_victim(is_fresh)
            if node is None:
                if is_fresh:
                    break
                self._find_victims()
                is_fresh = True
                continue
            freed += self.trim(node, max(node.allocated - (count - freed), 0))
            parent = node.parent
            if not node.allocated and parent is not None:
                heapq.heappop(self._victims)
                self.tree.prune(node)
                self._offer(parent)
        self.counters["evicted_tokens"] += freed
        return freed

    def _is_victim(self, node: Node) -> bool:
        stored = node.allocated > 0 and node.parent is not None
        return stored and self._is_idle(node) and not node.has_stored_children

    def _offer(self, node: Node) -> None:
        if self._is_victim(node):
            entry = (node.users > 0, node.last_use, next(self._serial), node)
            heapq.heappush(self._victims, entry)

    def _find_victims(self) -> None:
        self._victims = []
        for node in self.tree.nodes():
            self._victims_until = max(self._victims_until, node.last_use)
            self._offer(node)

    def _oldest_victim(self, is_fresh: bool) -> Node | None:
        """Top of the heap after putting changed entries right.

        None: the heap is empty, or (unless fresh) what it does not know may be older.
        """
        while self._victims:
            has_demand, last_use, _, node = self._victims[0]
            if not self._is_victim(node):
                heapq.heappop(self._victims)
            elif (node.users > 0, node.last_use) != (has_demand, last_use):
                heapq.heappop(self._victims)
                self._offer(node)
            elif is_fresh or not (has_demand or last_use > self._victims_until):
                return node
            else:
                return None
        return None

    def forget_extents(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Drop what is stored in the slot ranges [start, end): a failed step did not fill them.

        And all below it: nothing is stored behind a gap, whose reader would miss those slots.
        """
        for node in list(self.tree.nodes()):
            extent = node.extent
            if extent is not None and any(low <= extent < high for low, high in ranges):
                for below in list(self.tree.subtree(node)):
                    self.trim(below, 0)
                    self.tree.prune(below)

    # --- retirement ---------------------------------------------------------------------------

    def retire(self, slots: np.ndarray, step: int) -> None:
        """Return slots, int32 [count], once every step up to `step` has finished."""
        if not len(slots):
            return
        if step <= self.completed_step:
            self.arena.free_slots(slots)
            return
        self._retiring.append((step, slots))
        self.num_retiring += len(slots)

    def step_launched(self, step_id: int) -> None:
        self.launched_step = step_id

    def step_completed(self, step_id: int) -> None:
        """Every step up to `step_id` has finished: what they read may be reused."""
        if self._newest_reader_step > self.completed_step:
            self._num_evictable = None  # nodes that only a finished step still read are idle now
        self.completed_step = step_id
        still = []
        for step, slots in self._retiring:
            if step <= step_id:
                self.arena.free_slots(slots)
                self.num_retiring -= len(slots)
            else:
                still.append((step, slots))
        self._retiring = still
