"""Room for an extent without losing what lies there: idle KV moves out of a window.

    slots   .free.|-- idle --|###busy###|.free.|--- idle ---|.free.|##
                  ^ moved here          |<----- window, the extent ---->|

A full arena has free and idle slots everywhere, but rarely a long free run. It plans the copies of
the next step, within its budget; it does not know why a node deserves an extent.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from granikv.cache.prefix_tree import Node
from granikv.cache.spans_in_use import SlotWrite, SpanInUse
from granikv.cache.storage import NodeStorage
from granikv.cache.windows import cheapest_window
from granikv.core import Move

HOT_COST = 2.0  # of moving a slot of an extent, beside 1: it may be COLD from then on
DEMAND_COST = 4.0  # of evicting a slot that a waiting request wants, beside 1 to 2 for any


_FREE, _BUSY = -1, -2  # owners of slots, beside the indices of idle nodes


class Compactor:
    """Extents in one arena, and the moves of the next step: at most max_move_tokens of them."""

    def __init__(
        self,
        storage: NodeStorage,
        max_move_tokens: int,
        find_spans_in_use: Callable[[], list[SpanInUse]],
    ):
        self.storage = storage
        self._find_spans_in_use = find_spans_in_use
        self.max_move_tokens = max_move_tokens
        self.budget = max_move_tokens  # tokens that the next step may still move
        self.counters = {"moved_tokens": 0, "compacted_tokens": 0}
        self._moves: list[Move] = []
        self._slot_writes: list[SlotWrite] = []

    def add(self, move: Move) -> None:
        """A copy of the next step."""
        self._moves.append(move)
        self.budget -= move.length
        self.counters["moved_tokens"] += move.length

    def take(self) -> tuple[list[Move], list[SlotWrite]]:
        """The next step's copies, with disjoint sources and destinations; its request_slots."""
        moves, self._moves = self._moves, []
        slot_writes, self._slot_writes = self._slot_writes, []
        self.budget = self.max_move_tokens
        return moves, slot_writes

    @property
    def is_clearing(self) -> bool:
        """A window is kept for a copy: another one must wait for it."""
        return self.storage.window is not None

    # --- extents ------------------------------------------------------------------------------

    def reserve(self, node: Node) -> int | None:
        """First slot of an extent for an unwritten node; None: slots in use leave no room.

        What lies there moves in the next step, which may append to the extent: moves come first.
        """
        start = self.storage.arena.allocate_extent(len(node))
        if start is None:
            opened = self._open(node, [])
            if opened is None:
                return None
            start, _ = opened
        self.storage.assign_extent(node, start)
        return start

    def reserve_for_copy(self, node: Node) -> int | None:
        """First slot of an extent that the next step may copy a COLD node to.

        None while is_clearing: not yet. None otherwise: slots in use leave no room. A window that
        holds anything is cleared first and kept for the node until that step has finished.
        """
        storage = self.storage
        start = storage.arena.allocate_extent(len(node))
        if start is None:
            start = storage.take_window(node)
        if start is None:
            if self.is_clearing:
                return None
            opened = self._open(node, self._find_spans_in_use())
            if opened is None:
                return None
            start, num_moved = opened
            if num_moved:
                storage.keep_window(node, start)
                return None
        storage.assign_extent(node, start)
        return start

    # --- windows ------------------------------------------------------------------------------

    def _open(self, node: Node, spans: list[SpanInUse]) -> tuple[int, int] | None:
        """Take the cheapest run of free and movable slots that holds the node.

        (its first slot, tokens that move out of it in the next step); None: there is no such run.
        spans: steps in flight may read them until the next one has finished; idle nodes nobody
        reads.
        """
        storage, length = self.storage, len(node)
        if length > storage.arena.num_free + storage.num_evictable():
            return None
        path = set(storage.tree.path(node))
        idle = [n for n in storage.tree.nodes() if n.allocated and n not in path]
        idle = [n for n in idle if storage.is_idle(n)]
        owners = np.full(storage.arena.num_usable, _BUSY, np.int32)
        for low, high in storage.arena.free_ranges():
            owners[low:high] = _FREE
        for i, slots in enumerate([n.stored_slots() for n in idle] + [s.slots for s in spans]):
            owners[slots] = i
        start = self._choose(idle, spans, owners, length)
        if start is None:
            return None
        end = start + length
        inside = [i for i in np.unique(owners[start:end]) if i != _FREE]
        nodes = [idle[i] for i in inside if i < len(idle)]
        in_use = [spans[i - len(idle)] for i in inside if i >= len(idle)]
        num_free = storage.arena.take_free(start, end)
        budget = min(self.budget, storage.arena.num_free)
        num_moved = sum(self._replace(span, start, end) for span in in_use)
        budget -= num_moved
        staying, num_staying = self._evict_what_does_not_fit(nodes, start, end, budget)
        num_free += storage.arena.take_free(start, end)
        num_moved += num_staying
        assert num_free + num_moved == length, (num_free, num_moved, length)
        spare = budget - num_staying
        for other in staying:
            spare -= self._move_out(other, start, end, spare)
        return start, num_moved

    def _choose(
        self, idle: list[Node], spans: list[SpanInUse], owners: np.ndarray, length: int
    ) -> int | None:
        """First slot of the window with the least to move, or else the least to lose.

        owners: int32 [num_usable], index of the idle node or of a span behind them, or _FREE or
        _BUSY. Spans cannot be lost.
        """
        arena = self.storage.arena
        moving = [HOT_COST if n.is_hot else 1.0 for n in idle]
        moving += [1.0 + len(span.readers) for span in spans]  # each has its own slot list
        cost = np.array([*moving, np.inf, 0.0])[owners]
        start = cheapest_window(cost, length)
        fits = start is not None and cost[start : start + length].sum() <= self.budget
        if fits and length <= arena.num_free:
            return start
        newest = max((n.last_use for n in idle), default=0.0)
        oldest = min((n.last_use for n in idle), default=0.0)
        losing = []
        for node in idle:  # the newest counts twice the oldest, what somebody waits for 4 more
            age = (node.last_use - oldest) / (newest - oldest) if newest > oldest else 0.0
            losing.append(1.0 + age + (DEMAND_COST if node.users else 0.0))
        losing += [np.inf] * len(spans)
        return cheapest_window(np.array([*losing, np.inf, 0.0])[owners], length)

    def _evict_what_does_not_fit(
        self, nodes: list[Node], start: int, end: int, budget: int
    ) -> tuple[list[Node], int]:
        """(nodes that will move out of [start, end), how many of their tokens lie there).

        The newest stay, and what a request waits for.
        """
        staying: dict[Node, int] = {}
        for node in sorted(nodes, key=lambda n: (n.users > 0, n.last_use, -n.start), reverse=True):
            inside = _inside(node, start, end)
            if not len(inside):
                continue  # gone with an ancestor
            if sum(staying.values()) + len(inside) <= budget:
                staying[node] = len(inside)
            else:
                self.storage.evict_from(node, int(inside[0]))
                staying = {n: count for n, count in staying.items() if n.allocated}
        return list(staying), sum(staying.values())

    def _replace(self, span: SpanInUse, start: int, end: int) -> int:
        """Plan the copy of a span's slots in [start, end); returns their number."""
        inside = np.flatnonzero((span.slots >= start) & (span.slots < end))
        targets = self.storage.arena.allocate_slots(len(inside))
        self._move(span.slots[inside], targets)
        self._slot_writes += span.replace(inside, targets, self.storage.launched_step + 1)
        return len(inside)

    def _move_out(self, node: Node, start: int, end: int, spare: int) -> int:
        """Plan the copy of a node's slots in [start, end); returns tokens moved beside those.

        An extent moves as a whole if `spare` slots and tokens allow it; else its part from the
        window on, with all that is HOT below it, becomes COLD where it lies.
        """
        storage, inside = self.storage, _inside(node, start, end)
        if node.is_hot:
            target = None
            if node.allocated - len(inside) <= spare:
                target = storage.arena.allocate_extent(node.allocated)
            if target is not None:
                slots = node.stored_slots()
                self._move(slots, np.arange(target, target + len(slots), dtype=np.int32))
                outside = np.delete(slots, inside)
                storage.refill(node, target)
                storage.retire(outside, storage.launched_step + 1)
                return len(outside)
            storage.demote(node, int(inside[0]))
            inside = _inside(node, start, end)
        assert node.slots is not None
        slots = node.slots.copy()
        slots[inside] = storage.arena.allocate_slots(len(inside))
        self._move(node.slots[inside], slots[inside])
        storage.refill(node, slots)
        return 0

    def _move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copies between slots, int32 [count] each: one for each run of targets."""
        self.counters["compacted_tokens"] += len(sources)
        breaks = np.flatnonzero(np.diff(targets) != 1) + 1
        for source, target in zip(
            np.split(sources, breaks), np.split(targets, breaks), strict=True
        ):
            self.add(Move(source, int(target[0]), "compaction"))


def _inside(node: Node, start: int, end: int) -> np.ndarray:
    """Indices of a node's tokens that are stored in the slots [start, end)."""
    slots = node.stored_slots()
    return np.flatnonzero((slots >= start) & (slots < end))
