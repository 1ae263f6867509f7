"""Decode steps of the attention benchmark: groups of requests over one arena of random KV.

slots  |-- extent of group 0 --|-- extent of group 1 --| ... | suffixes, scattered ... |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from granikv.attention.layout_choice import BEST_CUTS, H200_RATES, Cuts, HotGroups, SmRates
from granikv.attention.splits import SplitPlan, plan_splits
from granikv.attention.variants import AttentionShape, Layout
from granikv.core import Count, SpanKind, StepPlan

MAX_ROWS, MAX_PARTIALS = 512, 16384  # of the benchmark's plan buffers
MAX_HOT_ITEMS, MAX_COLD_ITEMS = 8192, 16384


@dataclass(frozen=True)
class AttentionCase:
    """groups: (prefix tokens, requests) each; a prefix of 0 tokens makes a request private.

    suffix_len: private tokens of every request, or of each.
    """

    name: str
    groups: tuple[tuple[int, int], ...]
    suffix_len: int | tuple[int, ...] = 512

    @property
    def batch(self) -> int:
        return sum(size for _, size in self.groups)

    @property
    def suffix_lens(self) -> np.ndarray:
        """int32 [batch]; raises ValueError when there is not one for each request."""
        return np.broadcast_to(np.array(self.suffix_len, np.int32), (self.batch,))

    @property
    def prefix_of_request(self) -> np.ndarray:
        """int32 [batch]: tokens."""
        return np.repeat(*np.array(self.groups, np.int32).T)

    @property
    def unique_tokens(self) -> int:
        return sum(n for n, _ in self.groups) + int(self.suffix_lens.sum())

    @property
    def longest(self) -> int:
        return int((self.prefix_of_request + self.suffix_lens).max())


def standard_cases() -> list[AttentionCase]:
    """The rows that the project holds itself to on a GPU."""
    lens = (2048, 4096, 6144, 8192, 12288, 16384, 20480, 24576)
    return [
        *(AttentionCase(f"shared_16384_b{b}", ((16384, b),)) for b in (8, 32, 64, 128, 256)),
        AttentionCase("groups_8x16", tuple((n, 16) for n in lens)),
        AttentionCase("groups_64x4", ((4096, 4),) * 64),
        AttentionCase("shared_512_b128", ((512, 128),)),
        AttentionCase("flat_b64_16384", ((0, 64),), suffix_len=16384),
        # every length off a tile's multiple
        AttentionCase("ragged_16421_b64", ((16421, 64),), suffix_len=499),
        AttentionCase("ragged_8x16", tuple((n + 37, 16) for n in lens), suffix_len=499),
    ]


class CaseSpans:
    """What the planner sees of a case: its spans, without slot lists.

    prefix_starts, prefix_lens, sizes: int32 [num_groups], first slot, tokens and requests.
    suffixes: int32 [batch, 5], as plan_splits takes them. positions: int32 [batch], last tokens.
    """

    def __init__(self, case: AttentionCase, shape: AttentionShape):
        self.case, self.shape = case, shape
        self.prefix_lens, self.sizes = np.array(case.groups, np.int32).T
        self.prefix_starts = (np.cumsum(self.prefix_lens) - self.prefix_lens).astype(np.int32)
        self.owner = np.repeat(np.arange(len(self.sizes)), self.sizes)  # group of each request
        at, lengths = self.prefix_lens[self.owner], case.suffix_lens
        rows = np.arange(case.batch, dtype=np.int32)
        kind = np.full(case.batch, SpanKind.SLOTS, np.int32)
        self.suffixes = np.stack([rows, kind, at, lengths, at], 1).astype(np.int32)
        self.positions = (at + lengths - 1).astype(np.int32)

    def spans(self, shared: np.ndarray | None = None) -> tuple[HotGroups, np.ndarray]:
        """HOT groups and COLD spans when the groups in `shared` (bool; None: all) read their prefix
        once, and each request of the others reads it for itself, in place."""
        shared = np.ones(len(self.sizes), bool) if shared is None else shared
        used, of_row = shared & (self.prefix_lens > 0), ~shared & (self.prefix_lens > 0)
        indptr = np.concatenate([[0], np.cumsum(self.sizes[used])]).astype(np.int32)
        none = np.zeros(int(used.sum()), np.int32)
        rows = np.flatnonzero(used[self.owner]).astype(np.int32)
        groups = HotGroups(indptr, rows, self.prefix_starts[used], self.prefix_lens[used], none)
        alone = np.flatnonzero(of_row[self.owner])
        zero, owner = np.zeros_like(alone), self.owner[alone]
        runs = [
            alone,
            zero + SpanKind.RUN,
            self.prefix_starts[owner],
            self.prefix_lens[owner],
            zero,
        ]
        return groups, np.concatenate([np.stack(runs, 1), self.suffixes]).astype(np.int32)

    def split(
        self,
        num_sms: int,
        max_partials: int,
        layout: Layout | None = None,
        shared: np.ndarray | None = None,
        rates: SmRates = H200_RATES,
        cuts: Cuts = BEST_CUTS,
    ) -> SplitPlan:
        groups, cold = self.spans(shared)
        return plan_splits(
            groups, cold, self.case.batch, self.shape, num_sms, max_partials, layout, rates, cuts
        )

    def flat_split(self, num_sms: int, max_partials: int) -> SplitPlan:
        """No sharing: every request reads its whole context through its slot list."""
        total = self.positions + 1
        rows = np.arange(self.case.batch)
        zero = np.zeros_like(rows)
        spans = np.stack([rows, zero + SpanKind.SLOTS, zero, total, zero], 1)
        return plan_splits(
            HotGroups.empty(), spans, self.case.batch, self.shape, num_sms, max_partials
        )


class BenchStep(CaseSpans):
    """One decode step of a case: where its KV lies, and the plan for a layout."""

    def __init__(self, case: AttentionCase, shape: AttentionShape, capacity: int, seed: int = 0):
        """capacity: arena slots. Raises ValueError when the case does not fit."""
        super().__init__(case, shape)
        if case.unique_tokens >= capacity:
            raise ValueError(f"capacity: expected over {case.unique_tokens}, got {capacity}")
        rng = np.random.default_rng(seed)
        free = rng.permutation(np.arange(int(self.prefix_lens.sum()), capacity - 1, dtype=np.int32))
        ends = np.cumsum(case.suffix_lens)
        self.request_slots = np.zeros((case.batch, case.longest), np.int32)
        for row, (group, length) in enumerate(zip(self.owner, case.suffix_lens, strict=True)):
            at, start = self.prefix_lens[group], self.prefix_starts[group]
            self.request_slots[row, :at] = np.arange(start, start + at)
            self.request_slots[row, at : at + length] = free[ends[row] - length : ends[row]]

    def plan(self, split: SplitPlan) -> StepPlan:
        batch = self.case.batch
        counts = np.zeros(16, np.int32)
        counts[[Count.NUM_ROWS, Count.NUM_DECODE_ROWS]] = batch
        counts[Count.NUM_HOT_ITEMS] = len(split.hot_items)
        counts[Count.NUM_HOT_ROWS] = len(split.hot_rows)
        counts[Count.NUM_COLD_ITEMS] = len(split.cold_items)
        counts[Count.NUM_PARTIALS] = split.num_partials
        none = np.zeros(0, np.int32)
        return StepPlan(
            step_id=0,
            counts=counts,
            row_token=np.zeros(batch, np.int32),
            row_request=np.arange(batch, dtype=np.int32),
            row_position=self.positions,
            slot_mapping=self.request_slots[np.arange(batch), self.positions],
            hot_items=split.hot_items,
            hot_rows=split.hot_rows,
            cold_items=split.cold_items,
            merge_indptr=split.merge_indptr,
            merge_partials=split.merge_partials,
            qo_indptr=np.array([batch], np.int32),
            extend_indptr=np.zeros(1, np.int32),
            extend_segments=np.zeros((0, 8), np.int32),
            sample_rows=none,
            slot_writes=np.zeros((0, 3), np.int32),
        )

    def reference(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        """fp32 [len(rows), Hq, D] by dense attention; q [batch, Hq, D], k and v [capacity, Hkv, D].

        rows: None is all. FP8 k and v have the scale 1.
        """
        rows = range(self.case.batch) if rows is None else rows
        out = torch.empty((len(rows), *q.shape[1:]), device=q.device)
        shape, scale = self.shape, self.shape.head_dim**-0.5
        for index, row in enumerate(rows):
            length = int(self.positions[row]) + 1
            slots = torch.from_numpy(self.request_slots[row, :length]).to(q.device).long()
            grouped = q[row].float().view(shape.num_kv_heads, shape.group_size, -1)
            scores = torch.einsum("hgd,nhd->hgn", grouped, _gather(k, slots)) * scale
            state = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), _gather(v, slots))
            out[index] = state.reshape(shape.num_qo_heads, -1)
        return out


def _gather(arena: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """fp32 [len(slots), Hkv, D] of an arena; torch indexes FP8 as bytes only."""
    if arena.dtype.itemsize == 1:
        return arena.view(torch.uint8)[slots].view(arena.dtype).float()
    return arena[slots].float()
