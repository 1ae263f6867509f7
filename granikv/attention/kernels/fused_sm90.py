"""HOT and COLD items of a large step in one persistent launch on sm_90, written in Gluon.

    block = copying warp        K and V tiles of HOT items, by descriptor, into a ring
            2 HOT warpgroups    64 stacked rows each; softmax of a block beside the next product
            3 COLD warps        each pulls (item, KV head) from one counter

HOT items are dealt out statically, COLD ones when a warp is free: blocks with less HOT do more
COLD. The portable kernels hot.py and cold.py say what is computed; states are the same but for
rounding.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from granikv.core import ColdItem, Count, HotItem

_NUM_HOT = gl.constexpr(int(Count.NUM_HOT_ITEMS))
_NUM_COLD = gl.constexpr(int(Count.NUM_COLD_ITEMS))
_ROW_ENTRY = gl.constexpr(int(HotItem.FIRST_ROW_ENTRY))
_NUM_ROWS = gl.constexpr(int(HotItem.NUM_ROWS))
_KV_START = gl.constexpr(int(HotItem.KV_START))
_KV_LEN = gl.constexpr(int(HotItem.KV_LEN))
_POSITION = gl.constexpr(int(HotItem.POSITION))
_PARTIAL = gl.constexpr(int(HotItem.FIRST_PARTIAL))
_COLD_ROW = gl.constexpr(int(ColdItem.ROW))
_COLD_KIND = gl.constexpr(int(ColdItem.KIND))
_COLD_START = gl.constexpr(int(ColdItem.START))
_COLD_LEN = gl.constexpr(int(ColdItem.LEN))
_COLD_POSITION = gl.constexpr(int(ColdItem.POSITION))
_COLD_PARTIAL = gl.constexpr(int(ColdItem.FIRST_PARTIAL))


@gluon.jit
def _wait_for_previous(PDL: gl.constexpr):
    """Everything the launch before wrote is visible after this."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _start_dependents(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0",
            "=r",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


# -- HOT -----------------------------------------------------------------------------------------
# Ring entries of an item of n blocks: K0 K1 V0 K2 V1 ... K(n-1) V(n-2) V(n-1).


@gluon.jit
def _num_blocks(kv_len, BLOCK_N: gl.constexpr):
    return gl.maximum((kv_len + BLOCK_N - 1) // BLOCK_N, 1)


@gluon.jit
def _copy_tile(desc, row, column, entry, ring, full, empty, STAGES: gl.constexpr):
    slot = entry % STAGES
    mbarrier.wait(empty.index(slot), ((entry // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [row, column], full.index(slot), ring.index(slot))


@gluon.jit
def _copy_partition(
    k_desc,
    v_desc,
    ring,
    full,
    empty,
    hot_items_ptr,
    num_hot,
    HKV: gl.constexpr,
    D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    entry = gl.to_tensor(0)
    for work in range(gl.program_id(0), num_hot, gl.num_programs(0)):
        item_ptr = hot_items_ptr + work // HKV * 8
        column = work % HKV * D
        start = gl.load(item_ptr + _KV_START)
        blocks = _num_blocks(gl.load(item_ptr + _KV_LEN), BLOCK_N)
        _copy_tile(k_desc, start, column, entry, ring, full, empty, STAGES)
        entry += 1
        for j in range(1, blocks):
            _copy_tile(k_desc, start + j * BLOCK_N, column, entry, ring, full, empty, STAGES)
            _copy_tile(
                v_desc, start + (j - 1) * BLOCK_N, column, entry + 1, ring, full, empty, STAGES
            )
            entry += 2
        last = start + (blocks - 1) * BLOCK_N
        _copy_tile(v_desc, last, column, entry, ring, full, empty, STAGES)
        entry += 1


@gluon.jit
def _halves(x):
    """[M, N] -> its left and right half [M, N / 2]."""
    return gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def _row_max(x, LAYOUT: gl.constexpr):
    """max over axis 1, halves first: a plain reduction is one chain of dependent steps."""
    a, b = _halves(x)
    a, b = _halves(gl.maximum(a, b))
    return gl.convert_layout(gl.max(gl.maximum(a, b), 1), LAYOUT)


@gluon.jit
def _row_sum(x, LAYOUT: gl.constexpr):
    """The same for the sum."""
    a, b = _halves(x)
    a, b = _halves(a + b)
    return gl.convert_layout(gl.sum(a + b, 1), LAYOUT)


@gluon.jit
def _softmax(scores, n0, seen_len, m, total, scale_log2, BLOCK_N: gl.constexpr, MASKED: gl.constexpr):
    """Scores [64, N] of the keys from n0 on -> p, alpha, m, total."""
    if MASKED:
        LAYOUT: gl.constexpr = scores.type.layout
        n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        scores = gl.where(n[None, :] < seen_len[:, None], scores, float("-inf"))
    ROWS: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    m_new = gl.maximum(m, _row_max(scores, ROWS) * scale_log2)
    base = m_new
    if MASKED:
        # a row that has seen nothing yet keeps m = -inf; -inf - -inf would be NaN
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(scores * scale_log2 - base[:, None])
    alpha = gl.exp2(m - base)
    total = total * alpha + _row_sum(p, ROWS)
    return p, alpha, m_new, total


@gluon.jit
def _pin(total):
    """total, which is never negative; all that it is made of is computed before what follows.

    Without it ptxas moves the wait for a product before the softmax that is to run beside it.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred less; .reg .b32 ns; setp.lt.f32 less, $1, 0f00000000;"
        " selp.b32 ns, 1, 0, less; @less nanosleep.u32 ns; mov.f32 $0, $1; }",
        "=f,f",
        [total],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _hot_step(
    q_smem,
    ring,
    full,
    empty,
    entry,
    p,
    acc,
    m,
    total,
    n0,
    seen_len,
    scale_log2,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Scores of the block from n0 on beside the weighted sum p of the block before.

    No branch between the products and their wait: ptxas would wait at the branch.
    """
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = acc.type.layout
    no_scores = gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT)
    k_slot = entry % STAGES
    mbarrier.wait(full.index(k_slot), (entry // STAGES) & 1)
    scores = warpgroup_mma(
        q_smem, ring.index(k_slot).permute((1, 0)), no_scores, use_acc=False, is_async=True
    )
    v_slot = (entry + 1) % STAGES
    mbarrier.wait(full.index(v_slot), ((entry + 1) // STAGES) & 1)
    acc_next = warpgroup_mma(p, ring.index(v_slot), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(empty.index(k_slot), count=1)
    wide_p, alpha, m, total = _softmax(
        scores, n0, seen_len, m, total, scale_log2, BLOCK_N, MASKED
    )
    total = _pin(total)
    acc, wide_p, total = warpgroup_mma_wait(0, deps=[acc_next, wide_p, total])
    mbarrier.arrive(empty.index(v_slot), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
    p = gl.convert_layout(wide_p.to(q_smem.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    return p, acc, m, total


@gluon.jit
def _hot_partition(
    q_ptr,
    q_smem,  # [64, D]
    ring,  # [STAGES, BLOCK_N, D]
    full,
    empty,
    o_ptr,
    lse_ptr,
    hot_items_ptr,
    hot_rows_ptr,
    row_position_ptr,
    num_hot,
    q_stride,
    scale_log2,
    FIRST: gl.constexpr,  # stacked row of the tile that this warpgroup begins with
    G: gl.constexpr,
    HKV: gl.constexpr,
    D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    q_index = FIRST + gl.arange(0, 64, layout=gl.SliceLayout(1, Q_LAYOUT))
    q_d = gl.arange(0, D, layout=gl.SliceLayout(0, Q_LAYOUT))
    index = FIRST + gl.arange(0, 64, layout=S_ROWS)
    o_index = FIRST + gl.arange(0, 64, layout=O_ROWS)
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
    no_scores = gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT)
    entry = gl.to_tensor(0)
    _wait_for_previous(PDL)
    for work in range(gl.program_id(0), num_hot, gl.num_programs(0)):
        item_ptr = hot_items_ptr + work // HKV * 8
        head = work % HKV
        first_entry = gl.load(item_ptr + _ROW_ENTRY)
        num_rows = gl.load(item_ptr + _NUM_ROWS)
        kv_len = gl.load(item_ptr + _KV_LEN)
        position = gl.load(item_ptr + _POSITION)
        first_partial = gl.load(item_ptr + _PARTIAL)
        blocks = _num_blocks(kv_len, BLOCK_N)

        q_keep = q_index // G < num_rows
        q_row = gl.load(hot_rows_ptr + first_entry + q_index // G, mask=q_keep, other=0)
        q_at = q_row.to(gl.int64) * q_stride + (head * G + q_index % G) * D
        q = gl.load(q_ptr + q_at[:, None] + q_d[None, :], mask=q_keep[:, None], other=0.0)
        q_smem.store(q)
        fence_async_shared()
        keep = index // G < num_rows
        row = gl.load(hot_rows_ptr + first_entry + index // G, mask=keep, other=0)
        seen_len = gl.load(row_position_ptr + row, mask=keep, other=0) + 1 - position
        seen_len = gl.where(keep, gl.minimum(gl.maximum(seen_len, 0), kv_len), kv_len)
        shortest = gl.min(seen_len, 0)

        m = gl.full([64], float("-inf"), gl.float32, layout=S_ROWS)
        total = gl.zeros([64], gl.float32, layout=S_ROWS)
        acc = gl.zeros([64, D], gl.float32, layout=O_LAYOUT)
        slot = entry % STAGES
        mbarrier.wait(full.index(slot), (entry // STAGES) & 1)
        scores = warpgroup_mma(
            q_smem, ring.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(empty.index(slot), count=1)
        entry += 1
        wide_p, alpha, m, total = _softmax(
            scores, 0, seen_len, m, total, scale_log2, BLOCK_N, True
        )
        p = gl.convert_layout(wide_p.to(q_smem.dtype), P_LAYOUT)
        whole = gl.maximum(gl.minimum(shortest // BLOCK_N, blocks), 1)
        for j in range(1, whole):
            p, acc, m, total = _hot_step(
                q_smem, ring, full, empty, entry, p, acc, m, total, j * BLOCK_N, seen_len,
                scale_log2, BLOCK_N, STAGES, False,
            )  # fmt: skip
            entry += 2
        for j in range(whole, blocks):
            p, acc, m, total = _hot_step(
                q_smem, ring, full, empty, entry, p, acc, m, total, j * BLOCK_N, seen_len,
                scale_log2, BLOCK_N, STAGES, True,
            )  # fmt: skip
            entry += 2
        slot = entry % STAGES
        mbarrier.wait(full.index(slot), (entry // STAGES) & 1)
        acc_next = warpgroup_mma(p, ring.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc_next])
        mbarrier.arrive(empty.index(slot), count=1)
        entry += 1

        some = gl.where(total == 0.0, 1.0, total)
        lse = gl.where(total == 0.0, float("-inf"), m + gl.log2(some))
        to = (first_partial + index // G) * (HKV * G) + head * G + index % G
        gl.store(lse_ptr + to, lse, mask=keep)
        o = acc / gl.convert_layout(some, O_ROWS)[:, None]
        o_to = (first_partial + o_index // G) * (HKV * G) + head * G + o_index % G
        o_keep = o_index // G < num_rows
        gl.store(o_ptr + o_to.to(gl.int64)[:, None] * D + o_d[None, :], o, mask=o_keep[:, None])


# -- COLD ----------------------------------------------------------------------------------------
# Tokens are the rows of both products (keys x queries, then V^T x weights): the queries of a GQA
# group are the 8 columns of one instruction, half of what the padded rows would cost.


@gluon.jit
def _take(counter_ptr, num_cold, num_takers):
    """The next work index; whoever comes last, when all have come once too often, winds back."""
    work = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    if work == num_cold + num_takers - 1:
        gl.store(counter_ptr, 0)
    return work


@gluon.jit
def _cold_fields(
    work,
    num_cold,
    cold_items_ptr,
    row_position_ptr,
    row_request_ptr,
    slots_stride,
    HKV: gl.constexpr,
):
    """(row, partial, keys, first run slot or -1, offset of the slot list); harmless past the end."""
    valid = work < num_cold
    item_ptr = cold_items_ptr + gl.where(valid, work // HKV * 8, 0)
    row = gl.load(item_ptr + _COLD_ROW, mask=valid, other=0)
    kind = gl.load(item_ptr + _COLD_KIND, mask=valid, other=0)
    start = gl.load(item_ptr + _COLD_START, mask=valid, other=0)
    position = gl.load(item_ptr + _COLD_POSITION, mask=valid, other=0)
    length = gl.load(item_ptr + _COLD_LEN, mask=valid, other=0)
    partial = gl.load(item_ptr + _COLD_PARTIAL, mask=valid, other=0)
    keys = gl.load(row_position_ptr + row) + 1 - position
    keys = gl.minimum(gl.maximum(keys, 0), length)
    request = gl.load(row_request_ptr + row).to(gl.int64)
    offset = request * slots_stride + start
    run = gl.where(kind == 0, start, -1)
    return row, partial, keys, run, offset


@gluon.jit
def _cold_slots(block, n, keys, run, slots_ptr, BLOCK_N: gl.constexpr):
    """Arena slots int32 [N] of a block; beyond the end that of the last key."""
    at = gl.maximum(gl.minimum(block * BLOCK_N + n, keys - 1), 0)
    return gl.load(slots_ptr + at, mask=(run < 0) & (at >= 0), other=run + at)


@gluon.jit
def _cold_copy(slots, head, smem, ptr, COPY: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr):
    """Ask for the heads [N, D] of the slots; one group."""
    slots = gl.convert_layout(slots, gl.SliceLayout(1, COPY))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
    at = (slots.to(gl.int64) * (HKV * D) + head * D)[:, None] + d[None, :]
    async_copy.async_copy_global_to_shared(smem, ptr + at)
    async_copy.commit_group()


@gluon.jit
def _cold_partition(
    q_ptr,
    k_ptr,
    v_ptr,
    k_smem,  # [2, BLOCK_N, D]
    v_smem,  # [BLOCK_N, D]
    o_ptr,
    lse_ptr,
    cold_items_ptr,
    row_position_ptr,
    row_request_ptr,
    request_slots_ptr,
    counter_ptr,
    num_cold,
    num_takers,
    q_stride,
    slots_stride,
    scale_log2,
    G: gl.constexpr,
    HKV: gl.constexpr,
    D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PDL: gl.constexpr,
):
    GROUP: gl.constexpr = 8 if G <= 8 else 16
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    n = gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([1], [32], [1], [0]))
    key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, MMA))
    q_d = gl.arange(0, D, layout=gl.SliceLayout(1, RIGHT))
    q_g = gl.arange(0, GROUP, layout=gl.SliceLayout(0, RIGHT))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(1, MMA))
    o_g = gl.arange(0, GROUP, layout=gl.SliceLayout(0, MMA))
    no_scores = gl.zeros([BLOCK_N, GROUP], gl.float32, layout=MMA)
    _wait_for_previous(PDL)
    work = _take(counter_ptr, num_cold, num_takers)
    row, partial, keys, run, offset = _cold_fields(
        work, num_cold, cold_items_ptr, row_position_ptr, row_request_ptr, slots_stride, HKV
    )
    slots_ptr = request_slots_ptr + offset
    head = work % HKV
    # slots_j: of the block j after the current one; K is asked for two blocks ahead, V one
    slots_0 = _cold_slots(0, n, keys, run, slots_ptr, BLOCK_N)
    slots_1 = _cold_slots(1, n, keys, run, slots_ptr, BLOCK_N)
    slots_2 = _cold_slots(2, n, keys, run, slots_ptr, BLOCK_N)
    slots_3 = _cold_slots(3, n, keys, run, slots_ptr, BLOCK_N)
    # not `= head`: names of one value are carried as one through a while loop
    head_1 = work % HKV
    head_2 = work % HKV
    head_3 = work % HKV
    _cold_copy(slots_0, head, k_smem.index(0), k_ptr, COPY, HKV, D)
    _cold_copy(slots_1, head, k_smem.index(1), k_ptr, COPY, HKV, D)
    _cold_copy(slots_0, head, v_smem, v_ptr, COPY, HKV, D)
    buffer = gl.to_tensor(0)
    while work < num_cold:
        # At least four blocks: the next item's first ones are asked for during this one's last.
        blocks = gl.maximum((keys + BLOCK_N - 1) // BLOCK_N, 4)
        next_work = _take(counter_ptr, num_cold, num_takers)
        next_row, next_partial, next_keys, next_run, next_offset = _cold_fields(
            next_work, num_cold, cold_items_ptr, row_position_ptr, row_request_ptr,
            slots_stride, HKV,
        )  # fmt: skip
        next_slots_ptr = request_slots_ptr + next_offset
        next_head = next_work % HKV
        q_at = row.to(gl.int64) * q_stride + head * (G * D) + q_g[None, :] * D + q_d[:, None]
        q = gl.load(q_ptr + q_at, mask=q_g[None, :] < G, other=0.0)
        m = gl.full([GROUP], float("-inf"), gl.float32, layout=gl.SliceLayout(0, MMA))
        totals = gl.zeros([BLOCK_N, GROUP], gl.float32, layout=MMA)
        acc = gl.zeros([D, GROUP], gl.float32, layout=MMA)
        for i in range(0, blocks):
            # no branch: a load would be waited for where it ends
            ahead = i + 4
            now = ahead < blocks
            slots_4 = _cold_slots(
                gl.where(now, ahead, ahead - blocks),
                n,
                gl.where(now, keys, next_keys),
                gl.where(now, run, next_run),
                gl.where(now, slots_ptr, next_slots_ptr),
                BLOCK_N,
            )
            async_copy.wait_group(2)
            k = k_smem.index(buffer).load(LEFT)
            scores = mma_v2(k, q, no_scores) * scale_log2
            _cold_copy(slots_2, head_2, k_smem.index(buffer), k_ptr, COPY, HKV, D)
            scores = gl.where((i * BLOCK_N + key < keys)[:, None], scores, float("-inf"))
            m_new = gl.maximum(m, gl.max(scores, 0))
            base = gl.where(m_new == float("-inf"), 0.0, m_new)
            p = gl.exp2(scores - base[None, :])
            alpha = gl.exp2(m - base)
            totals = totals * alpha[None, :] + p
            p = gl.convert_layout(p.to(k.dtype), RIGHT)
            async_copy.wait_group(1)
            v = v_smem.permute((1, 0)).load(LEFT)
            acc = mma_v2(v, p, acc * alpha[None, :])
            _cold_copy(slots_1, head_1, v_smem, v_ptr, COPY, HKV, D)
            m = m_new
            buffer = 1 - buffer
            slots_1 = slots_2
            slots_2 = slots_3
            slots_3 = slots_4
            head_1 = head_2
            head_2 = head_3
            head_3 = gl.where(now, head, next_head)
        total = gl.sum(totals, 0)
        some = gl.where(total == 0.0, 1.0, total)
        to = partial * (HKV * G) + head * G + o_g
        lse = gl.where(total == 0.0, float("-inf"), m + gl.log2(some))
        gl.store(lse_ptr + to, lse, mask=o_g < G)
        o = acc / some[None, :]
        gl.store(
            o_ptr + to.to(gl.int64)[None, :] * D + o_d[:, None], o, mask=(o_g < G)[None, :]
        )
        work = next_work
        row = next_row
        partial = next_partial
        keys = next_keys
        run = next_run
        head = next_head
        slots_ptr = next_slots_ptr
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["q_stride", "slots_stride"])
def fused_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    o_ptr,
    lse_ptr,
    counts_ptr,
    hot_items_ptr,
    hot_rows_ptr,
    cold_items_ptr,
    row_position_ptr,
    row_request_ptr,
    request_slots_ptr,
    counter_ptr,  # int32 [1], 0 before and after
    q_stride,
    slots_stride,
    scale_log2,
    G: gl.constexpr,
    HKV: gl.constexpr,
    D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    COLD_N: gl.constexpr,
    HOT_REGISTERS: gl.constexpr,
    COLD_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    _start_dependents(PDL)
    dtype: gl.constexpr = k_desc.dtype
    COLD_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    q_smem = gl.allocate_shared_memory(dtype, [2, 64, D], k_desc.layout)
    ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    num_hot = gl.load(counts_ptr + _NUM_HOT) * HKV
    num_cold = gl.load(counts_ptr + _NUM_COLD) * HKV
    num_takers = gl.num_programs(0) * 4
    k_cold_0 = gl.allocate_shared_memory(dtype, [2, COLD_N, D], COLD_LAYOUT)
    k_cold_1 = gl.allocate_shared_memory(dtype, [2, COLD_N, D], COLD_LAYOUT)
    k_cold_2 = gl.allocate_shared_memory(dtype, [2, COLD_N, D], COLD_LAYOUT)
    k_cold_3 = gl.allocate_shared_memory(dtype, [2, COLD_N, D], COLD_LAYOUT)
    v_cold = gl.allocate_shared_memory(dtype, [4, COLD_N, D], COLD_LAYOUT)
    gl.warp_specialize(
        [
            (
                _hot_partition,
                (
                    q_ptr, q_smem.index(0), ring, full, empty, o_ptr, lse_ptr, hot_items_ptr,
                    hot_rows_ptr, row_position_ptr, num_hot, q_stride, scale_log2,
                    0, G, HKV, D, BLOCK_N, STAGES, PDL,
                ),
            ),
            (
                _hot_partition,
                (
                    q_ptr, q_smem.index(1), ring, full, empty, o_ptr, lse_ptr, hot_items_ptr,
                    hot_rows_ptr, row_position_ptr, num_hot, q_stride, scale_log2,
                    64, G, HKV, D, BLOCK_N, STAGES, PDL,
                ),
            ),
            (
                _cold_partition,
                (
                    q_ptr, k_ptr, v_ptr, k_cold_0, v_cold.index(0), o_ptr, lse_ptr,
                    cold_items_ptr, row_position_ptr, row_request_ptr, request_slots_ptr,
                    counter_ptr, num_cold, num_takers, q_stride, slots_stride, scale_log2,
                    G, HKV, D, COLD_N, PDL,
                ),
            ),
            (
                _cold_partition,
                (
                    q_ptr, k_ptr, v_ptr, k_cold_1, v_cold.index(1), o_ptr, lse_ptr,
                    cold_items_ptr, row_position_ptr, row_request_ptr, request_slots_ptr,
                    counter_ptr, num_cold, num_takers, q_stride, slots_stride, scale_log2,
                    G, HKV, D, COLD_N, PDL,
                ),
            ),
            (
                _cold_partition,
                (
                    q_ptr, k_ptr, v_ptr, k_cold_2, v_cold.index(2), o_ptr, lse_ptr,
                    cold_items_ptr, row_position_ptr, row_request_ptr, request_slots_ptr,
                    counter_ptr, num_cold, num_takers, q_stride, slots_stride, scale_log2,
                    G, HKV, D, COLD_N, PDL,
                ),
            ),
            (
                _cold_partition,
                (
                    q_ptr, k_ptr, v_ptr, k_cold_3, v_cold.index(3), o_ptr, lse_ptr,
                    cold_items_ptr, row_position_ptr, row_request_ptr, request_slots_ptr,
                    counter_ptr, num_cold, num_takers, q_stride, slots_stride, scale_log2,
                    G, HKV, D, COLD_N, PDL,
                ),
            ),
            (
                _copy_partition,
                (
                    k_desc, v_desc, ring, full, empty, hot_items_ptr, num_hot,
                    HKV, D, BLOCK_N, STAGES,
                ),
            ),
        ],
        [4, 1, 1, 1, 1, 4],
        [HOT_REGISTERS, COLD_REGISTERS, COLD_REGISTERS, COLD_REGISTERS, COLD_REGISTERS, 24],
    )  # fmt: skip
