"""Where the decode rows of a step read: groups over HOT nodes, COLD suffixes, merge lists.

    row 0  |== everyone ==|== group A ==|.. suffix ..|      one hot item per shared node,
    row 1  |== everyone ==|== group A ==|.. suffix .......| one cold item per suffix
    row 2  |== everyone ==|== group B ==|.. suffix ..|

From one decode step to the next only the suffixes grow. So the grouping is built once, and used
until the rows or the tree change; a step writes one column of `cold_items`. With a window it is
built again while an edge lies in a HOT node: rows at other positions see other parts of the node.

    row 0  |..|== node ==|.. suffix ..|      what most see stays one item; what a row sees beside
    row 1    ||== node ==|.. suffix .|       it, and a late row's whole part, are runs of that row
    row 2           |....|.. suffix ...|

It knows nothing of costs: a function given by the dispatcher decides each group's variant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from granikv.cache.prefix_tree import Node
from granikv.core import Choice, ColdItem, HotItem, HotVariant, Request, SpanKind

Decide = Callable[[int, int, int], Choice]  # (position, length, rows of the group)
_Alone = tuple[int, Node, int, int]  # a run that one row reads: row, node, its positions [a, b)


def first_seen(visible: np.ndarray, window: int | None) -> np.ndarray:
    """Position of the first key of rows that end behind `visible` tokens; int32 like it."""
    return np.zeros_like(visible) if window is None else np.maximum(visible - window, 0)


def shared_from(first: list[int], end: int) -> int:
    """From where one item should serve rows that read [first[i], end): the fewest tokens in all.

    Rows that begin earlier read what is before it alone, rows that begin later all of theirs.
    """
    starts = np.sort(first)
    num_rows, before = len(starts), np.cumsum(starts)
    sharing = np.arange(1, num_rows + 1)
    rests = sharing * starts - before
    alone = (num_rows - sharing) * end - (before[-1] - before)
    return int(starts[np.argmin(end - starts + rests + alone)])


class DecodeSpans:
    """Spans and partials of the decode rows, one visible range per row.

    requests: one per row. visible: int32 [num_rows], tokens that the row sees, its own included.
    hot_paths: distinct paths of HOT nodes, in position order; path_of_row: each row's index of
    them. version: of running requests and tree, see `fits`. window: tokens that a row sees at most,
    None: all. Sets num_hot_tokens of the requests.
    Arrays are shared by consecutive plans and never written again.
    """

    def __init__(
        self,
        requests: list[Request],
        visible: np.ndarray,
        hot_paths: list[list[Node]],
        path_of_row: list[int],
        decide: Decide,
        version: tuple[int, int],
        window: int | None = None,
    ):
        self.requests, self.version, self.window = requests, version, window
        self.row_request = np.fromiter((r.row for r in requests), np.int32, len(requests))
        groups: dict[Node, list[int]] = {}
        alone: list[_Alone] = []
        path_ends = [path[-1].end if path else 0 for path in hot_paths]
        path_groups: dict[int, list[list[int]]] = {}
        hot_end = []
        first = first_seen(visible, window)
        ranges = zip(path_of_row, first.tolist(), visible.tolist(), strict=True)
        for row, (index, begin, sees) in enumerate(ranges):
            end = path_ends[index]
            if end <= sees and begin == 0:
                if index not in path_groups:
                    path_groups[index] = [groups.setdefault(n, []) for n in hot_paths[index]]
                for group in path_groups[index]:
                    group.append(row)
            else:
                end = min(end, sees)
                for node in hot_paths[index]:
                    if node.end <= begin:
                        continue
                    if node.end <= sees:
                        groups.setdefault(node, []).append(row)
                    elif node.start < sees:
                        alone.append((row, node, max(node.start, begin), sees))
            requests[row].num_hot_tokens = end
            hot_end.append(end)
        self.choices: list[Choice] = []
        self._flat_choices: list[Choice] | None = None
        shared = [self._share(n, rows, first, decide, alone) for n, rows in groups.items()]
        most = max(self.choices, key=lambda c: c.kv_len * c.num_rows, default=None)
        self.main_variant = most.variant if most is not None else "cold"  # reads most HOT tokens
        self._hot_end = np.array(hot_end, np.int32)
        self._hot_begin = np.minimum(first, self._hot_end)
        self._has_suffix = visible > self._hot_end
        self._suffix_rows = np.flatnonzero(self._has_suffix)
        self._build_items(shared, alone, self._suffix_start(visible))

    def flat_choices(self) -> list[Choice]:
        """Of a step whose planner reads every shared span once for each row."""
        if self._flat_choices is None:
            why = "flat: sharing does not pay in this step"
            self._flat_choices = [
                c
                if c.variant == "flat"
                else replace(c, variant="flat", reason=f"{why}; {c.reason}")
                for c in self.choices
            ]
        return self._flat_choices

    def fits(self, requests: list[Request], visible: np.ndarray, version: tuple[int, int]) -> bool:
        """Whether these rows differ from the ones it was built for in suffix lengths only.

        version: (of the running requests, of the tree); equal ones mean equal rows of the request
        table and equal paths.
        """
        return (
            version == self.version
            and requests == self.requests
            and bool((visible >= self._hot_end).all())
            and bool(((visible > self._hot_end) == self._has_suffix).all())
            and (self.window is None or self._keeps_edge(visible))
        )

    def _keeps_edge(self, visible: np.ndarray) -> bool:
        """No row's window has moved within its HOT nodes."""
        begin = np.minimum(first_seen(visible, self.window), self._hot_end)
        return bool((begin == self._hot_begin).all())

    def _suffix_start(self, visible: np.ndarray) -> np.ndarray:
        """int32 [num_suffixes]: the first position that a row reads of its suffix."""
        start = self._hot_end
        if self.window is not None:
            start = np.maximum(start, first_seen(visible, self.window))
        return start[self._suffix_rows]

    def _share(
        self, node: Node, rows: list[int], first: np.ndarray, decide: Decide, alone: list[_Alone]
    ) -> tuple[Node, int, list[int]]:
        """(node, position, rows): who reads the node together from where on; the rest to `alone`."""
        start = node.start
        begins = first[rows].clip(start).tolist() if self.window is not None else [start]
        if max(begins) == start:
            self.choices.append(decide(start, len(node), len(rows)))
            return node, start, rows
        start = shared_from(begins, node.end)
        together = [row for row, begin in zip(rows, begins, strict=True) if begin <= start]
        choice = decide(start, node.end - start, len(together))
        self.choices.append(choice)
        for row, begin in zip(rows, begins, strict=True):
            end = start if begin <= start and choice.variant != "flat" else node.end
            if begin < end:
                alone.append((row, node, begin, end))
        return node, start, together if choice.variant != "flat" else []

    def _build_items(
        self,
        groups: list[tuple[Node, int, list[int]]],
        alone: list[_Alone],
        suffix_start: np.ndarray,
    ) -> None:
        """Partials are numbered over groups, then runs of one row, then suffixes."""
        nodes = _int32(
            [(at, _slot(node, at), node.end - at) for node, at, _ in groups]
            + [(at, _slot(node, at), end - at) for _, node, at, end in alone]
        ).reshape(-1, 3)
        sizes = np.array([len(rows) for *_, rows in groups] + [1] * len(alone), np.int64)
        variants = [choice.variant for choice in self.choices] + ["flat"] * len(alone)
        shared = np.array([variant != "flat" for variant in variants], bool)
        rows = _int32([row for *_, group in groups for row in group] + [run[0] for run in alone])

        is_hot = np.repeat(shared, sizes)  # of each (row, node) pair
        kinds = [HotVariant.GEMM if v == "gemm" else HotVariant.CASCADE for v in variants]
        self.hot_rows = rows[is_hot]
        hot = np.zeros((int(shared.sum()), 8), np.int32)
        hot[:, HotItem.FIRST_ROW_ENTRY] = _starts(sizes[shared])
        hot[:, HotItem.NUM_ROWS] = sizes[shared]
        hot[:, HotItem.KV_START] = nodes[shared, 1]
        hot[:, HotItem.KV_LEN] = nodes[shared, 2]
        hot[:, HotItem.POSITION] = nodes[shared, 0]
        hot[:, HotItem.FIRST_PARTIAL] = _starts(sizes)[shared]
        hot[:, HotItem.VARIANT] = _int32(kinds)[shared]
        self.hot_items = hot

        pairs = np.repeat(nodes, sizes, axis=0)  # [num_pairs, 3]
        flat = np.flatnonzero(~is_hot)
        num_suffixes = len(self._suffix_rows)
        cold = np.zeros((len(flat) + num_suffixes, 8), np.int32)
        runs, suffixes = cold[: len(flat)], cold[len(flat) :]
        runs[:, ColdItem.ROW] = rows[flat]
        runs[:, ColdItem.KIND] = SpanKind.RUN
        runs[:, ColdItem.START] = pairs[flat, 1]
        runs[:, ColdItem.LEN] = pairs[flat, 2]
        runs[:, ColdItem.POSITION] = pairs[flat, 0]
        runs[:, ColdItem.FIRST_PARTIAL] = flat
        suffixes[:, ColdItem.ROW] = self._suffix_rows
        suffixes[:, ColdItem.KIND] = SpanKind.SLOTS
        suffixes[:, ColdItem.START] = suffixes[:, ColdItem.POSITION] = suffix_start
        suffixes[:, ColdItem.FIRST_PARTIAL] = np.arange(len(rows), len(rows) + num_suffixes)
        self._cold_template = cold
        self.num_partials = len(rows) + num_suffixes

        tokens = nodes[:, 2].astype(np.int64)
        self._prefix_read = int(np.where(shared, tokens, tokens * sizes).sum())
        self._prefix_flat = int((tokens * sizes).sum())

        rows = np.concatenate([rows, self._suffix_rows])
        order = np.lexsort((np.concatenate([pairs[:, 0], suffix_start]), rows))  # stable
        self.merge_partials = order.astype(np.int32)
        self.merge_indptr = np.zeros(len(self.requests) + 1, np.int32)
        np.cumsum(np.bincount(rows, minlength=len(self.requests)), out=self.merge_indptr[1:])

    def cold_items(self, visible: np.ndarray) -> tuple[np.ndarray, int, int]:
        """(cold_items, tokens read, tokens of one read per row) of a step that `fits`."""
        items = self._cold_template.copy()
        start = self._suffix_start(visible)
        lengths = visible[self._suffix_rows] - start
        suffixes = items[len(items) - len(lengths) :]
        suffixes[:, ColdItem.LEN] = lengths
        if self.window is not None:
            suffixes[:, ColdItem.START] = suffixes[:, ColdItem.POSITION] = start
        num_tokens = int(lengths.sum())
        return items, self._prefix_read + num_tokens, self._prefix_flat + num_tokens


def _slot(node: Node, position: int) -> int:
    """The arena slot of a position that the HOT node holds."""
    assert node.extent is not None
    return node.extent + position - node.start


def _int32(values: list) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _starts(sizes: np.ndarray) -> np.ndarray:
    """First index of each of consecutive runs of `sizes`."""
    return np.cumsum(sizes) - sizes
