"""Decode steps of the attention benchmark: groups of requests over one arena of random KV.

slots  |-- extent of group 0 --|-- extent of group 1 --| ... | suffixes, scattered ... |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from granikv.attention.splits import HotGroups, SplitPlan, plan_splits
from granikv.attention.variants import AttentionShape, Layout
from granikv.core import Count, SpanKind, StepPlan


@dataclass(frozen=True)
class AttentionCase:
    """groups: (prefix tokens, requests) each; a prefix of 0 tokens makes a request private."""

    name: str
    groups: tuple[tuple[int, int], ...]
    suffix_len: int = 512

    @property
    def batch(self) -> int:
        return sum(size for _, size in self.groups)

    @property
    def unique_tokens(self) -> int:
        return sum(n for n, _ in self.groups) + self.batch * self.suffix_len

    @property
    def longest(self) -> int:
        return max(n for n, _ in self.groups) + self.suffix_len


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


class BenchStep:
    """One decode step of a case: where its KV lies, and the plan for a layout."""

    def __init__(self, case: AttentionCase, shape: AttentionShape, capacity: int, seed: int = 0):
        """capacity: arena slots. Raises ValueError when the case does not fit."""
        if case.unique_tokens >= capacity:
            raise ValueError(f"capacity: expected over {case.unique_tokens}, got {capacity}")
        self.case, self.shape = case, shape
        rng = np.random.default_rng(seed)
        lens = np.array([n for n, _ in case.groups], np.int32)
        sizes = np.array([size for _, size in case.groups], np.int32)
        starts = (np.cumsum(lens) - lens).astype(np.int32)
        owner = np.repeat(np.arange(len(lens)), sizes)
        batch, suffix = case.batch, case.suffix_len
        scattered = rng.permutation(np.arange(int(lens.sum()), capacity - 1))[: batch * suffix]
        self.suffix_slots = scattered.reshape(batch, suffix).astype(np.int32)
        self.prefix = [(int(starts[g]), int(lens[g])) for g in owner]
        self.request_slots = np.zeros((batch, case.longest), np.int32)
        for row, (start, length) in enumerate(self.prefix):
            self.request_slots[row, :length] = np.arange(start, start + length)
            self.request_slots[row, length : length + suffix] = self.suffix_slots[row]
        rows = np.arange(batch, dtype=np.int32)
        used = lens > 0
        indptr = np.concatenate([[0], np.cumsum(sizes[used])]).astype(np.int32)
        none = np.zeros(int(used.sum()), np.int32)
        self.groups = HotGroups(indptr, rows[used[owner]], starts[used], lens[used], none)
        at = lens[owner]
        kind = np.full(batch, SpanKind.SLOTS)
        self.suffixes = np.stack([rows, kind, at, np.full(batch, suffix), at], 1).astype(np.int32)
        self.positions = (at + suffix - 1).astype(np.int32)

    def split(self, num_sms: int, max_partials: int, layout: Layout | None = None) -> SplitPlan:
        return plan_splits(
            self.groups, self.suffixes, self.case.batch, self.shape, num_sms, max_partials, layout
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
            slot_mapping=self.suffix_slots[:, -1],
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

    def reference(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """fp32 [batch, Hq, D] by dense attention; q [batch, Hq, D], k and v [capacity, Hkv, D].

        FP8 k and v have the scale 1.
        """
        out = torch.empty(q.shape, device=q.device)
        shape, scale = self.shape, self.shape.head_dim**-0.5
        for row in range(self.case.batch):
            length = int(self.positions[row]) + 1
            slots = torch.from_numpy(self.request_slots[row, :length]).to(q.device).long()
            grouped = q[row].float().view(shape.num_kv_heads, shape.group_size, -1)
            scores = torch.einsum("hgd,nhd->hgn", grouped, _gather(k, slots)) * scale
            state = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), _gather(v, slots))
            out[row] = state.reshape(shape.num_qo_heads, -1)
        return out


def _gather(arena: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """fp32 [len(slots), Hkv, D] of an arena; torch indexes FP8 as bytes only."""
    if arena.dtype.itemsize == 1:
        return arena.view(torch.uint8)[slots].view(arena.dtype).float()
    return arena[slots].float()
