"""The free list of the token arena.

    0                                             capacity
    |HOT|HOT|........ free ........|COLD COLD COLD|pad|

HOT extents come from the low end by best fit, COLD slots from the high end; the boundary moves
with the load. The last slot takes the writes of padded rows and is never handed out.
With pages, COLD slots are taken and returned in whole pages, each aligned to its size.
It knows slots only: not tensors, not tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from granikv.errors import ArenaExhausted


class TokenArena:
    """Allocator over `capacity` token slots; free space is a sorted list of intervals.

    page_tokens: every count asked for is a multiple of it; slots behind the last whole page are
    never handed out.
    """

    def __init__(self, capacity: int, page_tokens: int = 1):
        self.capacity = capacity
        self.num_usable = (capacity - 1) // page_tokens * page_tokens
        self._starts = [0]
        self._ends = [self.num_usable]
        self.num_free = self.num_usable

    @property
    def padding_slot(self) -> int:
        return self.capacity - 1

    def allocate_slots(self, count: int) -> np.ndarray:
        """int32 [count] COLD slots from the high end. Raises ArenaExhausted, taking nothing."""
        if count > self.num_free:
            raise ArenaExhausted(f"COLD slots: expected {count} free, got {self.num_free}")
        parts = []
        need = count
        while need:
            start, end = self._starts[-1], self._ends[-1]
            take = min(need, end - start)
            parts.append(np.arange(end - take, end, dtype=np.int32))
            if take == end - start:
                self._starts.pop()
                self._ends.pop()
            else:
                self._ends[-1] = end - take
            need -= take
        self.num_free -= count
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def allocate_extent(self, length: int) -> int | None:
        """First slot of a contiguous range, best fit, lowest address; None: none is long enough."""
        best, best_size = -1, self.capacity + 1
        for i, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if length <= end - start < best_size:
                best, best_size = i, end - start
        if best < 0:
            return None
        start = self._starts[best]
        if best_size == length:
            del self._starts[best], self._ends[best]
        else:
            self._starts[best] = start + length
        self.num_free -= length
        return start

    def take_free(self, start: int, end: int) -> int:
        """Take whatever is free in [start, end); returns how many slots."""
        kept, taken = [], 0
        for low, high in self.free_ranges():
            taken += max(min(high, end) - max(low, start), 0)
            parts = ((low, min(high, start)), (max(low, end), high))
            kept += [(a, b) for a, b in parts if a < b]
        self._starts = [low for low, _ in kept]
        self._ends = [high for _, high in kept]
        self.num_free -= taken
        return taken

    def free_extent(self, start: int, length: int) -> None:
        """Return the range [start, start + length). Raises ValueError on a double free."""
        if length == 0:
            return
        end = start + length
        i = bisect_right(self._starts, start)
        overlaps_left = i > 0 and self._ends[i - 1] > start
        overlaps_right = i < len(self._starts) and self._starts[i] < end
        if overlaps_left or overlaps_right or start < 0 or end > self.num_usable:
            raise ValueError(f"slots [{start}, {end}): expected in use, got free or out of range")
        joins_left = i > 0 and self._ends[i - 1] == start
        joins_right = i < len(self._starts) and self._starts[i] == end
        if joins_left and joins_right:
            self._ends[i - 1] = self._ends[i]
            del self._starts[i], self._ends[i]
        elif joins_left:
            self._ends[i - 1] = end
        elif joins_right:
            self._starts[i] = start
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)
        self.num_free += length

    def free_slots(self, slots: np.ndarray) -> None:
        """Return COLD slots, int32 [count], in any order."""
        if len(slots) == 0:
            return
        ordered = np.sort(np.asarray(slots))
        breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
        for run in np.split(ordered, breaks):
            self.free_extent(int(run[0]), len(run))

    def free_ranges(self) -> list[tuple[int, int]]:
        """Free slots as ranges [start, end), by address."""
        return list(zip(self._starts, self._ends, strict=True))

    def is_free(self, slot: int) -> bool:
        i = bisect_left(self._ends, slot + 1)
        return i < len(self._starts) and self._starts[i] <= slot
