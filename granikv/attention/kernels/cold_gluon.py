"""cold_suffix_attention in Gluon: keys are the rows of both products.

    scores^T [N, 8] = K [N, D] x q^T [D, 8]        o^T [D, 8] += V^T [D, N] x p^T [N, 8]

The queries of a GQA group are the 8 columns of one instruction, where cold.py pads them to 16 rows:
half the products and half the accumulators, so that more blocks fit beside HOT ones. K and V are
asked for as soon as the block before has left their buffer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from granikv.attention.kernels.common import KIND_RUN as _KIND_RUN
from granikv.core import ColdItem, Count

KIND_RUN = gl.constexpr(int(_KIND_RUN.value))
_NUM_ITEMS = gl.constexpr(int(Count.NUM_COLD_ITEMS))
_ROW = gl.constexpr(int(ColdItem.ROW))
_KIND = gl.constexpr(int(ColdItem.KIND))
_START = gl.constexpr(int(ColdItem.START))
_LEN = gl.constexpr(int(ColdItem.LEN))
_POSITION = gl.constexpr(int(ColdItem.POSITION))
_PARTIAL = gl.constexpr(int(ColdItem.FIRST_PARTIAL))


@gluon.jit
def wait_for_previous(PDL: gl.constexpr):
    """Everything the launch before wrote is visible after this."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def start_dependents(PDL: gl.constexpr):
    """The next launch may start its prologue now; it still waits before it reads."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0",
            "=r",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _slots(block, n, keys, start, slots_ptr, is_run, BLOCK_N: gl.constexpr):
    """Arena slots int32 [N] of a block; beyond the end that of the last key."""
    at = gl.maximum(gl.minimum(block * BLOCK_N + n, keys - 1), 0)
    return gl.load(slots_ptr + at, mask=(at >= 0) & (not is_run), other=start + at)


@gluon.jit
def _copy(slots, base, smem, COPY: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr):
    """Ask for the heads [N, D] of the slots; one group."""
    slots = gl.convert_layout(slots, gl.SliceLayout(1, COPY))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
    at = (slots.to(gl.int64) * (HKV * D))[:, None] + d[None, :]
    async_copy.async_copy_global_to_shared(smem, base + at)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["q_stride", "slots_stride"])
def cold_gluon_kernel(
    q_ptr,  # [T, HKV * G, D], row stride q_stride
    k_ptr,  # [capacity, HKV, D]
    v_ptr,
    o_ptr,  # fp32 [S, HKV * G, D]
    lse_ptr,  # fp32 [S, HKV * G]
    counts_ptr,  # int32 [16]
    cold_items_ptr,  # int32 [C, 8]
    row_position_ptr,
    row_request_ptr,
    request_slots_ptr,
    q_stride,
    slots_stride,
    scale_log2,
    G: gl.constexpr,
    HKV: gl.constexpr,
    D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr,  # 1 or 2
    V_STAGES: gl.constexpr,  # 1, or 2 when K_STAGES is 2
    PDL: gl.constexpr,
):
    GROUP: gl.constexpr = 8 if G <= 8 else 16
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    SMEM: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    V_WAIT: gl.constexpr = 3 if V_STAGES == 2 else 1
    start_dependents(PDL)
    item = gl.program_id(0) // HKV
    head = gl.program_id(0) % HKV
    if item >= gl.load(counts_ptr + _NUM_ITEMS):
        # a launch must not end before the one it depends on, even without work
        wait_for_previous(PDL)
        return
    item_ptr = cold_items_ptr + item * 8
    row = gl.load(item_ptr + _ROW)
    is_run = gl.load(item_ptr + _KIND) == KIND_RUN
    start = gl.load(item_ptr + _START)
    position = gl.load(item_ptr + _POSITION)
    keys = gl.load(row_position_ptr + row) + 1 - position
    keys = gl.minimum(gl.maximum(keys, 0), gl.load(item_ptr + _LEN))
    partial = gl.load(item_ptr + _PARTIAL)
    request = gl.load(row_request_ptr + row).to(gl.int64)
    slots_ptr = request_slots_ptr + request * slots_stride + start
    blocks = (keys + BLOCK_N - 1) // BLOCK_N

    n = gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([1], [32], [1], [0]))
    key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, MMA))
    q_d = gl.arange(0, D, layout=gl.SliceLayout(1, RIGHT))
    q_g = gl.arange(0, GROUP, layout=gl.SliceLayout(0, RIGHT))
    k_smem = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [K_STAGES, BLOCK_N, D], SMEM)
    v_smem = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [V_STAGES, BLOCK_N, D], SMEM)
    k_base, v_base = k_ptr + head * D, v_ptr + head * D
    # slots_j: of the block j after the current one
    slots_0 = _slots(0, n, keys, start, slots_ptr, is_run, BLOCK_N)
    slots_1 = _slots(1, n, keys, start, slots_ptr, is_run, BLOCK_N)
    slots_2 = _slots(2, n, keys, start, slots_ptr, is_run, BLOCK_N)
    wait_for_previous(PDL)  # so far only the plan was read
    _copy(slots_0, k_base, k_smem.index(0), COPY, HKV, D)
    if V_STAGES == 2:
        _copy(slots_0, v_base, v_smem.index(0), COPY, HKV, D)
    if K_STAGES == 2:
        _copy(slots_1, k_base, k_smem.index(1), COPY, HKV, D)
    if V_STAGES == 2:
        _copy(slots_1, v_base, v_smem.index(1), COPY, HKV, D)
    else:
        _copy(slots_0, v_base, v_smem.index(0), COPY, HKV, D)
    q_at = row.to(gl.int64) * q_stride + head * (G * D) + q_g[None, :] * D + q_d[:, None]
    q = gl.load(q_ptr + q_at, mask=q_g[None, :] < G, other=0.0)
    m = gl.full([GROUP], float("-inf"), gl.float32, layout=gl.SliceLayout(0, MMA))
    totals = gl.zeros([BLOCK_N, GROUP], gl.float32, layout=MMA)
    acc = gl.zeros([D, GROUP], gl.float32, layout=MMA)
    no_scores = gl.zeros([BLOCK_N, GROUP], gl.float32, layout=MMA)
    for i in range(0, blocks):
        slots_3 = _slots(i + 3, n, keys, start, slots_ptr, is_run, BLOCK_N)
        k_slot = i % K_STAGES
        v_slot = i % V_STAGES
        async_copy.wait_group(K_STAGES + V_STAGES - 1)
        k = k_smem.index(k_slot).load(LEFT)
        scores = mma_v2(k, q, no_scores) * scale_log2
        ahead = slots_2 if K_STAGES == 2 else slots_1
        _copy(ahead, k_base, k_smem.index(k_slot), COPY, HKV, D)
        scores = gl.where((i * BLOCK_N + key < keys)[:, None], scores, float("-inf"))
        m_new = gl.maximum(m, gl.max(scores, 0))
        p = gl.exp2(scores - m_new[None, :])
        alpha = gl.exp2(m - m_new)
        totals = totals * alpha[None, :] + p
        p = gl.convert_layout(p.to(k.dtype), RIGHT)
        async_copy.wait_group(V_WAIT)
        v = v_smem.index(v_slot).permute((1, 0)).load(LEFT)
        acc = mma_v2(v, p, acc * alpha[None, :])
        ahead = slots_2 if V_STAGES == 2 else slots_1
        _copy(ahead, v_base, v_smem.index(v_slot), COPY, HKV, D)
        m = m_new
        slots_1 = slots_2
        slots_2 = slots_3
    async_copy.wait_group(0)
    total = gl.sum(totals, 0)
    some = gl.where(total == 0.0, 1.0, total)
    o_d = gl.arange(0, D, layout=gl.SliceLayout(1, MMA))
    o_g = gl.arange(0, GROUP, layout=gl.SliceLayout(0, MMA))
    to = partial * (HKV * G) + head * G + o_g
    lse = gl.where(total == 0.0, float("-inf"), m + gl.log2(some))
    gl.store(lse_ptr + to, lse, mask=o_g < G)
    o = acc / some[None, :]
    gl.store(o_ptr + to.to(gl.int64)[None, :] * D + o_d[:, None], o, mask=(o_g < G)[None, :])
