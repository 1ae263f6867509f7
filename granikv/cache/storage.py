"""Where the KV of tree nodes lies: locking, growth, trimming, eviction, retirement of slots.

Slots given back while a launched step may still read them are *retiring* until it has finished.
It knows nodes, slots and steps; neither requests' progress nor what deserves an extent.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count as counter
from typing import NamedTuple

import numpy as np

from granikv.cache.arena import TokenArena
from granikv.cache.prefix_tree import Node, PrefixTree


class Window(NamedTuple):
    """Slots taken for a node that is to be copied there when `step` has moved out what they hold."""

    node: Node
    start: int
    length: int
    step: int

    def fits(self, node: Node) -> bool:
        return self.node is node and self.length == len(node)


class NodeStorage:
    """Arena and tree of one cache. page_tokens: COLD slots are taken in pages of that many."""

    def __init__(self, capacity: int, page_tokens: int):
        self.page_tokens = page_tokens
        self.arena = TokenArena(capacity, page_tokens)
        self.tree = PrefixTree(page_tokens)
        self.launched_step = -1
        self.completed_step = -1
        self.window: Window | None = None
        self._num_retiring = 0
        self._retiring: list[tuple[int, np.ndarray]] = []  # (step that may still use them, slots)
        self._num_evictable: int | None = 0  # None: count again
        self._newest_reader_step = -1  # of nodes that nobody locks
        self._newest_refill_step = -1
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
        spared = sum(node.allocated for node in path if self.is_idle(node))
        if self.num_evictable() - spared < lacking:
            if self.window is None:
                return False
            self.drop_window()
            return self.make_room(count, path)
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

    def adopt(self, node: Node, slots: np.ndarray, last_use: float, filled_step: int) -> None:
        """A node without storage takes over written slots, int32 [len]."""
        node.slots, node.allocated, node.published = slots.copy(), len(slots), len(slots)
        node.last_use, node.reader_step = last_use, self.launched_step
        node.filled_step = filled_step
        self._newest_reader_step = self.launched_step
        self._num_evictable = None

    # --- extents ------------------------------------------------------------------------------

    def assign_extent(self, node: Node, start: int) -> None:
        """The node is HOT from the taken slot `start` on.

        What a COLD one stores is copied by the next step; its slots return behind that.
        """
        if node.slots is not None:
            self.retire(node.slots[: node.allocated], self.launched_step + 1)
            self._fill(node)
        node.extent, node.slots, node.allocated = start, None, len(node)
        self.tree.version += 1
        self._num_evictable = None

    def refill(self, node: Node, place: int | np.ndarray) -> None:
        """The next step copies what an idle node stores to `place`, all or part of it.

        An extent's first slot, or slots, int32 [len]. The slots left behind are the caller's.
        """
        if isinstance(place, np.ndarray):
            node.slots = place
        else:
            node.extent = place
        self._fill(node)
        self._newest_refill_step = node.filled_step
        self.tree.version += 1
        self._num_evictable = None

    def _fill(self, node: Node) -> None:
        step = self.launched_step + 1
        node.filled_step = node.reader_step = step
        self._newest_reader_step = step

    def demote(self, node: Node, keep: int) -> None:
        """An idle HOT node stays so for its first `keep` tokens; the rest of it is COLD in place.

        And all below it: every ancestor of a HOT node is HOT.
        """
        if keep:
            self.tree.split(node, keep)
        for below in self.tree.subtree(node):
            if below.is_hot:
                slots = np.full(len(below), -1, np.int32)
                slots[: below.allocated] = below.stored_slots()
                below.extent, below.slots = None, slots
        self.tree.version += 1

    def keep_window(self, node: Node, start: int) -> None:
        """Taken slots, which the next step empties, wait for the node: at most one window."""
        self.window = Window(node, start, len(node), self.launched_step + 1)

    def take_window(self, node: Node) -> int | None:
        """First slot of the window that was kept for this node, once it is empty."""
        window = self.window
        if window is None or not window.fits(node) or window.step > self.completed_step:
            return None
        self.window = None
        return window.start

    def drop_window(self) -> None:
        """Return the window's slots: nobody waits for it, or others need them more."""
        window, self.window = self.window, None
        if window is not None:
            slots = np.arange(window.start, window.start + window.length, dtype=np.int32)
            self.retire(slots, window.step)

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
            if self.is_idle(node):  # last read by a finished step: its slots come free at once
                self.retire(slots, self.completed_step)
                if self._num_evictable is not None:
                    self._num_evictable -= freed
            else:
                self.retire(slots, max(self.launched_step, node.filled_step))
            node.allocated, node.published = keep, min(node.published, keep)
            if not keep:
                node.extent = node.slots = None
            if node.users:  # else it is on nobody's path: what was derived from paths stays right
                self.tree.version += 1
        return freed

    def evict_from(self, node: Node, keep: int) -> None:
        """Evict an idle node behind its first `keep` tokens, and all below it."""
        freed = 0
        for below in list(self.tree.subtree(node)):
            freed += self.trim(below, keep if below is node else 0)
        for below in reversed(list(self.tree.subtree(node))):
            if not below.allocated:
                self.tree.prune(below)
        self.counters["evicted_tokens"] += freed

    def is_idle(self, node: Node) -> bool:
        """An idle node's descendants are idle: they are unlocked with it or before it."""
        return node.locks == 0 and node.reader_step <= self.completed_step

    def num_evictable(self) -> int:
        """Slots that evict() can free now."""
        if self._num_evictable is None:
            self._num_evictable = sum(n.allocated for n in self.tree.nodes() if self.is_idle(n))
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
        return stored and self.is_idle(node) and not node.has_stored_children

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

    def forget_moves(self, step_id: int) -> None:
        """Drop what the moves of a failed step did not write.

        And all below it: nothing is stored behind a gap, whose reader would miss those slots.
        """
        for node in list(self.tree.nodes()):
            if node.filled_step == step_id:
                for below in list(self.tree.subtree(node)):
                    self.trim(below, 0)
                    self.tree.prune(below)

    # --- retirement ---------------------------------------------------------------------------

    @property
    def num_retiring(self) -> int:
        """Slots that no node stores and that are not free yet: a kept window is among them."""
        return self._num_retiring + (self.window.length if self.window is not None else 0)

    def retire(self, slots: np.ndarray, step: int) -> None:
        """Return slots, int32 [count], once every step up to `step` has finished."""
        if not len(slots):
            return
        if step <= self.completed_step:
            self.arena.free_slots(slots)
            return
        self._retiring.append((step, slots))
        self._num_retiring += len(slots)

    def step_launched(self, step_id: int) -> None:
        self.launched_step = step_id

    def step_completed(self, step_id: int) -> None:
        """Every step up to `step_id` has finished: what they read may be reused."""
        if self._newest_reader_step > self.completed_step:
            self._num_evictable = None  # nodes that only a finished step still read are idle now
        if self._newest_refill_step > self.completed_step:
            self._victims = []  # its moves left nodes idle that are older than those
        if self.window is not None and self.window.step < step_id:
            self.drop_window()  # a step could have used it
        self.completed_step = step_id
        still = []
        for step, slots in self._retiring:
            if step <= step_id:
                self.arena.free_slots(slots)
                self._num_retiring -= len(slots)
            else:
                still.append((step, slots))
        self._retiring = still
