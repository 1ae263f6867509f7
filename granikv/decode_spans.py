"""Where the decode rows of a step read: groups over HOT nodes, COLD suffixes, merge lists.

    row 0  |== everyone ==|== group A ==|.. suffix ..|      one hot item per shared node,
    row 1  |== everyone ==|== group A ==|.. suffix .......| one cold item per suffix
    row 2  |== everyone ==|== group B ==|.. suffix ..|

From one decode step to the next only the suffixes grow. So the grouping is built once, and used
until the rows or the tree change; a step writes one column of `cold_items`.
It knows nothing of costs: a function given by the dispatcher decides each group's variant.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from granikv.cache.prefix_tree import Node
from granikv.core import Choice, ColdItem, HotItem, HotVariant, Request, SpanKind

Decide = Callable[[int, int, int], Choice]  # (position, length, rows of the group)


class DecodeSpans:
    """Spans and partials of the decode rows, one visible range per row.

    requests: one per row. visible: int32 [num_rows], tokens that the row sees, its own included.
    hot_paths: distinct paths of HOT nodes, in position order; path_of_row: each row's index of
    them. version: of running requests and tree, see `fits`. Sets num_hot_tokens of the requests.
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
    ):
        self.requests, self.version = requests, version
        self.row_request = np.fromiter((r.row for r in requests), np.int32, len(requests))
        groups: dict[Node, list[int]] = {}
        clipped: list[tuple[int, Node, int]] = []  # queries inside a node: row, node, length
        path_ends = [path[-1].end if path else 0 for path in hot_paths]
        path_groups: dict[int, list[list[int]]] = {}
        hot_end = []
        for row, (index, sees) in enumerate(zip(path_of_row, visible.tolist(), strict=True)):
            end = path_ends[index]
            if end <= sees:
                if index not in path_groups:
                    path_groups[index] = [groups.setdefault(n, []) for n in hot_paths[index]]
                for group in path_groups[index]:
                    group.append(row)
            else:
                end = sees
                for node in hot_paths[index]:
                    if node.end <= sees:
                        groups.setdefault(node, []).append(row)
                    elif node.start < sees:
                        clipped.append((row, node, sees - node.start))
            requests[row].num_hot_tokens = end
            hot_end.append(end)
        self.choices = [decide(n.start, len(n), len(rows)) for n, rows in groups.items()]
        most = max(self.choices, key=lambda c: c.kv_len * c.num_rows, default=None)
        self.main_variant = most.variant if most is not None else "cold"  # reads most HOT tokens
        self._hot_end = np.array(hot_end, np.int32)
        self._has_suffix = visible > self._hot_end
        self._suffix_rows = np.flatnonzero(self._has_suffix)
        self._build_items(groups, clipped)

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
        )

    def _build_items(
        self, groups: dict[Node, list[int]], clipped: list[tuple[int, Node, int]]
    ) -> None:
        """Partials are numbered over groups, then clipped nodes, then suffixes."""
        nodes = _int32(
            [(node.start, node.extent, len(node)) for node in groups]
            + [(node.start, node.extent, length) for _, node, length in clipped]
        ).reshape(-1, 3)
        sizes = np.array([len(rows) for rows in groups.values()] + [1] * len(clipped), np.int64)
        variants = [choice.variant for choice in self.choices] + ["flat"] * len(clipped)
        shared = np.array([variant != "flat" for variant in variants], bool)
        rows = _int32([row for group in groups.values() for row in group] + [c[0] for c in clipped])

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
        suffix_start = self._hot_end[self._suffix_rows]
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
        lengths = (visible - self._hot_end)[self._suffix_rows]
        items[len(items) - len(lengths) :, ColdItem.LEN] = lengths
        num_tokens = int(lengths.sum())
        return items, self._prefix_read + num_tokens, self._prefix_flat + num_tokens


def _int32(values: list) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _starts(sizes: np.ndarray) -> np.ndarray:
    """First index of each of consecutive runs of `sizes`."""
    return np.cumsum(sizes) - sizes
