"""A dispatcher that has no choice: each shared prefix is read in one way, whatever its group is.

flat: contiguous, but once for every row; cascade: once for a group, on a GPU always in row tiles
of one size, which serve any group.
Against uniform paging and the real dispatcher these tell what storage, kernel and dispatch gain.
"""

from __future__ import annotations

from dataclasses import replace

from granikv.attention.variants import layouts_of
from granikv.core import Choice
from granikv.dispatcher import Dispatcher
from granikv.engine import Engine

CASCADE_LAYOUT = "mid"


class FixedDispatcher(Dispatcher):
    """Takes the place of engine.dispatcher. variant: "flat" or "cascade"."""

    def __init__(self, engine: Engine, variant: str):
        cutter, window = engine.dispatcher.cutter, engine.dispatcher.window
        if cutter is not None and variant == "cascade":
            cutter = replace(cutter, hot_layout=layouts_of(cutter.shape)[CASCADE_LAYOUT])
        super().__init__(engine.dispatcher.cost, engine.cache, cutter, window)
        self.variant = variant

    def _predict(self, position: int, kv_len: int, num_rows: int) -> Choice:
        return Choice(position, kv_len, num_rows, self.variant, f"{self.variant}: fixed", 0.0)
