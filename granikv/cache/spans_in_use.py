"""KV that running requests read through request_slots: it may move while they run.

    request 0  |== HOT ==|-- shared, COLD --|-- its own --|-- tail, published --|appended now|
    request 1  |== HOT ==|-- shared, COLD --|-- tail, published --|appended now|
                         |<----------- spans in use ------------->|

A plan names such tokens by their position, so a move changes entries of request_slots and nothing
else. What a step in flight or the next one appends to stays where it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from granikv.cache.prefix_tree import Node
from granikv.core import Request

# (row, first position, slots), or one row and position per slot
SlotWrite = tuple[int | np.ndarray, int | np.ndarray, np.ndarray]


@dataclass(frozen=True)
class SpanInUse:
    """Published COLD slots of a node, or of the tail behind a request's path (node: None).

    position: of the first token. slots: int32 [count]. readers: running requests
    whose entries of request_slots name them.
    """

    position: int
    slots: np.ndarray
    readers: list[Request]
    node: Node | None = None

    def replace(self, indices: np.ndarray, slots: np.ndarray, step: int) -> list[SlotWrite]:
        """Moves of `step` put the tokens at `indices`, int [count], into `slots`, int32 [count].

        Returns what that step writes to request_slots.
        """
        made = self.slots.copy()
        made[indices] = slots
        if self.node is not None:
            self.node.slots, self.node.filled_step = made, step
        else:
            self.readers[0].tail_slots[: len(made)] = made.tolist()
            self.readers[0].tail_filled_step = step
        positions = self.position + indices
        return [(row, positions, slots) for row in (r.row for r in self.readers) if row is not None]


def spans_in_use(
    running: Iterable[tuple[Request, list[Node]]],
    admitted: Collection[Request],
    completed_step: int,
) -> list[SpanInUse]:
    """Spans of running requests, given with their paths.

    admitted: those whose slots the next step writes anyway. What a move of a step after
    `completed_step` writes is left out: if that step fails, what it did not write must be known.
    """
    spans = []
    readers: dict[Node, list[Request]] = {}
    for request, path in running:
        for node in path:
            found = readers.setdefault(node, [])
            if request not in admitted:
                found.append(request)
        published = min(request.num_published - request.leaf_end, len(request.tail_slots))
        if published > 0 and request.tail_filled_step <= completed_step:
            tail = np.asarray(request.tail_slots[:published], np.int32)
            spans.append(SpanInUse(request.leaf_end, tail, [request]))
    for node, requests in readers.items():
        if node.is_complete and not node.is_hot and node.filled_step <= completed_step:
            spans.append(SpanInUse(node.start, node.stored_slots(), requests, node))
    return spans
