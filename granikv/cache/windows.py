"""Room for an extent in a full arena: the window that costs the cache least.

    slots   .free.|-- idle --|###busy###|.free.|--- idle, older ---|.free.|##
                                        |<----- window of `length` ----->|

A full arena has free and idle slots everywhere, but rarely a long free run: extents would fall
back to COLD just when sharing is heaviest. It knows slots and costs, not nodes or trees.
"""

from __future__ import annotations

import numpy as np


def cheapest_window(cost: np.ndarray, length: int) -> int | None:
    """First slot of the cheapest run of `length` slots; None: every run has a busy slot.

    cost: float64 [num_slots], 0 free, above 0 idle, inf busy. The lowest address wins a tie.
    """
    if length > len(cost):
        return None
    busy = np.isinf(cost)
    total = np.concatenate(([0.0], np.cumsum(np.where(busy, 0.0, cost))))
    num_busy = np.concatenate(([0], np.cumsum(busy)))
    windows = total[length:] - total[:-length]
    windows[num_busy[length:] > num_busy[:-length]] = np.inf
    start = int(np.argmin(windows))
    return None if np.isinf(windows[start]) else start
