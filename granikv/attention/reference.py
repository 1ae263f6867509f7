"""Torch twins of the attention kernels: the readable oracle that every backend is tested against.

A segment's attention is a state (o, lse_log2): o is already normalised, lse_log2 is the base-2
log of the sum of exp(score); an empty segment is (0, -inf), the identity of the merge. Partials
are fp32. Slots outside the visible keys are never read, so NaN there cannot leak.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from granikv.core import ColdItem, Count, ExtendSegment, HotItem, SpanKind, StepPlan

LOG2E = math.log2(math.e)
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # e4m3 has no infinity


def quantize_kv(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x / scale in e4m3: saturated, rounded to even; NaN stays NaN."""
    return (x.float() * (1 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def append_kv(
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    slot_mapping: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_scales: tuple[float, float] | None = None,
) -> None:
    """Write rows k, v [T, Hkv, D] to slots slot_mapping [T] of the arenas [capacity, Hkv, D].

    kv_scales: of K and V that are stored as FP8, in arenas of any type that holds those values.
    """
    index = slot_mapping.long()
    if kv_scales is not None:
        k, v = quantize_kv(k, kv_scales[0]), quantize_kv(v, kv_scales[1])
    k_arena[index] = k.to(k_arena.dtype)
    v_arena[index] = v.to(v_arena.dtype)


def attention_state(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float,
    num_visible: torch.Tensor | None = None,
    num_hidden: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """State of q [rows, Hq, D] over k, v [n, Hkv, D]; row i sees the first num_visible[i] keys
    but for the first num_hidden[i].

    Returns o fp32 [rows, Hq, D] and lse_log2 fp32 [rows, Hq].
    """
    rows, num_qo_heads, head_dim = q.shape
    n, num_kv_heads, _ = k.shape
    if n == 0:
        return (
            torch.zeros(rows, num_qo_heads, head_dim),
            torch.full((rows, num_qo_heads), -math.inf),
        )
    grouped = q.float().view(rows, num_kv_heads, num_qo_heads // num_kv_heads, head_dim)
    scores = torch.einsum("rhgd,nhd->rhgn", grouped, k.float()) * sm_scale
    if num_visible is not None:
        hidden = torch.arange(n)[None, :] >= num_visible[:, None]
        scores = scores.masked_fill(hidden[:, None, None, :], -math.inf)
    if num_hidden is not None:
        hidden = torch.arange(n)[None, :] < num_hidden[:, None]
        scores = scores.masked_fill(hidden[:, None, None, :], -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(torch.isinf(lse), 0.0, lse)[..., None])
    o = torch.einsum("rhgn,nhd->rhgd", weights, v.float())
    return o.reshape(rows, num_qo_heads, head_dim), lse.view(rows, num_qo_heads) * LOG2E


def merge_states(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge states o [..., D], lse_log2 [...]; an empty side returns the other bit for bit."""
    m = torch.maximum(lse_a, lse_b)
    m = torch.where(torch.isneginf(m), 0.0, m)
    w_a, w_b = torch.exp2(lse_a - m), torch.exp2(lse_b - m)
    total = w_a + w_b
    o = (w_a[..., None] * o_a + w_b[..., None] * o_b) / total[..., None]
    lse = m + torch.log2(total)
    a_empty, b_empty = torch.isneginf(lse_a), torch.isneginf(lse_b)
    o = torch.where(b_empty[..., None], o_a, torch.where(a_empty[..., None], o_b, o))
    return o, torch.where(b_empty, lse_a, torch.where(a_empty, lse_b, lse))


def _visible(position: int, span_start: int, span_len: int) -> int:
    """Keys of the span [span_start, span_start + span_len) that a row at `position` sees."""
    return max(0, min(span_len, position + 1 - span_start))


def hot_prefix_attention(
    q: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    plan: StepPlan,
    sm_scale: float,
    o_partials: torch.Tensor,
    lse_partials: torch.Tensor,
) -> None:
    """One read of every HOT span for its rows; fills o [S, Hq, D] and lse_log2 [S, Hq]."""
    for item in plan.hot_items[: plan.counts[Count.NUM_HOT_ITEMS]]:
        first, rows_len = int(item[HotItem.FIRST_ROW_ENTRY]), int(item[HotItem.NUM_ROWS])
        start, length = int(item[HotItem.KV_START]), int(item[HotItem.KV_LEN])
        partial = int(item[HotItem.FIRST_PARTIAL])
        for i, row in enumerate(plan.hot_rows[first : first + rows_len]):
            n = _visible(int(plan.row_position[row]), int(item[HotItem.POSITION]), length)
            span = slice(start, start + n)
            o, lse = attention_state(q[row : row + 1], k_arena[span], v_arena[span], sm_scale)
            o_partials[partial + i], lse_partials[partial + i] = o[0], lse[0]


def cold_suffix_attention(
    q: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    request_slots: torch.Tensor,
    plan: StepPlan,
    sm_scale: float,
    o_partials: torch.Tensor,
    lse_partials: torch.Tensor,
) -> None:
    """Every COLD span for its row; request_slots int32 [max_requests, max_seq_len]."""
    for item in plan.cold_items[: plan.counts[Count.NUM_COLD_ITEMS]]:
        row, partial = int(item[ColdItem.ROW]), int(item[ColdItem.FIRST_PARTIAL])
        n = _visible(
            int(plan.row_position[row]), int(item[ColdItem.POSITION]), int(item[ColdItem.LEN])
        )
        slots = span_slots(
            int(item[ColdItem.KIND]),
            int(item[ColdItem.START]),
            n,
            int(plan.row_request[row]),
            request_slots,
        )
        o, lse = attention_state(q[row : row + 1], k_arena[slots], v_arena[slots], sm_scale)
        o_partials[partial], lse_partials[partial] = o[0], lse[0]


def span_slots(
    kind: int, start: int, length: int, request_row: int, request_slots: torch.Tensor
) -> torch.Tensor:
    """Slots int64 [length] of a span; raises ValueError for an unknown kind."""
    if kind == SpanKind.RUN:
        return torch.arange(start, start + length)
    if kind == SpanKind.SLOTS:
        return request_slots[request_row, start : start + length].long()
    raise ValueError(f"span kind: expected one of {[int(k) for k in SpanKind]}, got {kind}")


def merge_partials(
    plan: StepPlan, o_partials: torch.Tensor, lse_partials: torch.Tensor, out: torch.Tensor
) -> None:
    """Merge each decode row's partials in plan order into out [T, Hq, D]; no partials give 0."""
    for row in range(int(plan.counts[Count.NUM_DECODE_ROWS])):
        o = torch.zeros_like(out[row], dtype=torch.float32)
        lse = torch.full(o.shape[:1], -math.inf)
        for s in plan.merge_partials[plan.merge_indptr[row] : plan.merge_indptr[row + 1]]:
            o, lse = merge_states(o, lse, o_partials[s], lse_partials[s])
        out[row] = o


def extend_attention(
    q: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    request_slots: torch.Tensor,
    plan: StepPlan,
    sm_scale: float,
    out: torch.Tensor,
    window: int = 0,
) -> None:
    """Rows of each extend request over its segments; a row sees positions up to its own, the last
    `window` of them or (0) all."""
    for i in range(int(plan.counts[Count.NUM_EXTEND_REQUESTS])):
        rows = slice(int(plan.qo_indptr[i]), int(plan.qo_indptr[i + 1]))
        positions = torch.from_numpy(np.asarray(plan.row_position[rows], dtype=np.int64))
        request_row = int(plan.row_request[rows.start])
        o = torch.zeros(q[rows].shape)
        lse = torch.full(q[rows].shape[:2], -math.inf)
        for seg in plan.extend_segments[plan.extend_indptr[i] : plan.extend_indptr[i + 1]]:
            kind, start, length, position = (
                int(seg[c])
                for c in (
                    ExtendSegment.KIND,
                    ExtendSegment.START,
                    ExtendSegment.LEN,
                    ExtendSegment.POSITION,
                )
            )
            # keys that no row sees are not read at all
            length = _visible(int(positions.max()), position, length)
            lowest = positions + 1 - window if window else torch.zeros_like(positions)
            skipped = min(max(0, int(lowest.min()) - position), length)
            slots = span_slots(kind, start, length, request_row, request_slots)[skipped:]
            position += skipped
            part = attention_state(
                q[rows], k_arena[slots], v_arena[slots], sm_scale,
                positions + 1 - position, lowest - position,
            )  # fmt: skip
            o, lse = merge_states(o, lse, *part)
        out[rows] = o


def attention_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    request_slots: torch.Tensor,
    plan: StepPlan,
    sm_scale: float,
    kv_scales: tuple[float, float] | None = None,
    window: int = 0,
) -> torch.Tensor:
    """The recipe: append, hot, cold, merge, extend. q [T, Hq, D] -> [T, Hq * D].

    kv_scales: see append_kv; that of K goes into the scores, that of V into the output.
    window: of extend rows; the plan's items are clipped to it already.
    """
    k_scale, v_scale = kv_scales or (1.0, 1.0)
    sm_scale *= k_scale
    num_rows = int(plan.counts[Count.NUM_ROWS])
    mapping = torch.from_numpy(np.asarray(plan.slot_mapping[:num_rows], dtype=np.int64))
    append_kv(k_arena, v_arena, mapping, k[:num_rows], v[:num_rows], kv_scales)
    num_partials = int(plan.counts[Count.NUM_PARTIALS])
    o_partials = torch.zeros(num_partials, *q.shape[1:])
    lse_partials = torch.full((num_partials, q.shape[1]), -math.inf)
    out = torch.zeros(q.shape)
    hot_prefix_attention(q, k_arena, v_arena, plan, sm_scale, o_partials, lse_partials)
    cold_suffix_attention(
        q, k_arena, v_arena, request_slots, plan, sm_scale, o_partials, lse_partials
    )
    merge_partials(plan, o_partials, lse_partials, out)
    extend_attention(q, k_arena, v_arena, request_slots, plan, sm_scale, out, window)
    return out.flatten(1) * v_scale
