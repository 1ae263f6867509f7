"""What the attention kernels share: the dot helper, the online softmax and dependent launches.

Scores are kept in base 2: score * sm_scale * log2(e), so that exp2 replaces exp.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

# Decided when the kernels are decorated, as Triton itself does.
INTERPRET: bool = bool(knobs.runtime.interpret)

KIND_RUN = tl.constexpr(0)  # SpanKind.RUN
FP16_MAX = tl.constexpr(65504.0)
FP8_MAX = tl.constexpr(448.0)  # of e4m3, which has no infinity
FP8_LEAST_NORMAL = tl.constexpr(2.0**-6)
FP8_TO_STEP = tl.constexpr(1.5 * 2.0**14)  # x + this - this: x in steps of 2**-9, below 2**-6
LOG2_E = 1.4426950408889634


@triton.jit
def dot(a, b, INTERPRET: tl.constexpr):
    """a @ b in fp32; fp32 operands stay exact (ieee).

    The interpreter multiplies bf16 bit patterns instead of values, so there both are widened.
    """
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a.to(b.dtype), b, input_precision="ieee")


@triton.jit
def dot_add(a, b, acc, INTERPRET: tl.constexpr):
    """acc + a @ b; a is rounded to b's type, except under the interpreter."""
    if INTERPRET:
        wide = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        return acc + wide
    else:
        return tl.dot(a.to(b.dtype), b, acc, input_precision="ieee")


@triton.jit
def as_operand(q, kv_dtype: tl.constexpr):
    """q in the type of the products. Beside FP8 KV 16-bit queries become fp16: it holds every e4m3
    exactly and one instruction widens two of them, where bf16 takes four.
    """
    if (kv_dtype == tl.float8e4nv) and (q.dtype == tl.bfloat16):
        wide = q.to(tl.float32)
        kept = tl.clamp(wide, -FP16_MAX, FP16_MAX, propagate_nan=tl.PropagateNan.ALL)
        return kept.to(tl.float16)
    else:
        return q


@triton.jit
def as_e4m3_pair(q, INTERPRET: tl.constexpr):
    """q [M, D] as (high + low) * scale [M], high and low in e4m3: 8 bits of each number, as bf16 has.

    Two products with K as it is stored take as long as one in 16 bits, and K is not widened.
    """
    wide = q.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    scale = tl.where(largest > 0.0, largest / FP8_MAX, 1.0)
    scaled = wide / scale[:, None]
    high = to_e4m3(scaled, INTERPRET)
    return high, to_e4m3(scaled - high.to(tl.float32), INTERPRET), scale


@triton.jit
def as_operands(q, kv_dtype: tl.constexpr, scale_log2, PAIR: tl.constexpr, INTERPRET: tl.constexpr):
    """(q, low, scale) as `attend` takes them; low is read with PAIR alone."""
    if PAIR:
        high, low, scale = as_e4m3_pair(q, INTERPRET)
        return high, low, scale * scale_log2
    else:
        wide = as_operand(q, kv_dtype)
        return wide, wide, scale_log2


@triton.jit
def scores_of(q, low, k, PAIR: tl.constexpr, INTERPRET: tl.constexpr):
    """q k^T [M, N], with PAIR (q + low) k^T, both in K's type."""
    if PAIR:
        k_t = tl.trans(k)
        return dot_add(low, k_t, dot(q, k_t, INTERPRET), INTERPRET)
    else:
        return dot(q, tl.trans(k.to(q.dtype)), INTERPRET)


@triton.jit
def values(v, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """V in the type of the products: FP8 is widened, all else is there already."""
    if INTERPRET or (v.dtype != tl.float8e4nv or dtype != tl.float16):
        return v.to(dtype)
    else:
        # Opaque, or the compiler would change to an operand's layout first: V is read across its
        # rows, and FP8 cannot be transposed on the way from shared memory but byte by byte.
        return tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2;"
            " cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }",
            "=r,=r,r",
            [v],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )


@triton.jit
def to_e4m3(x, INTERPRET: tl.constexpr):
    """x in fp32 as e4m3, saturated and rounded to even; NaN stays NaN."""
    x = tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRET:  # whose own conversion drops the carry of a rounded mantissa
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        small = x + FP8_TO_STEP - FP8_TO_STEP
        x = tl.where(tl.abs(x) < FP8_LEAST_NORMAL, small, bits.to(tl.float32, bitcast=True))
    return x.to(tl.float8e4nv)


@triton.jit
def attend(q, low, k, v, acc, m, total, scale, PAIR: tl.constexpr, INTERPRET: tl.constexpr):
    """One block of keys that every row sees: q [M, D], k and v [N, D] -> acc, m, total.

    scale: of the scores, to base 2. With PAIR q and low are as_e4m3_pair's, and scale is [M].
    """
    scores = scores_of(q, low, k, PAIR, INTERPRET)
    m_new = tl.maximum(m, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * (scale[:, None] if PAIR else scale) - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    total = total * alpha + tl.sum(p, 1)
    v = values(v, tl.float16 if PAIR else q.dtype, INTERPRET)
    return dot_add(p, v, acc * alpha[:, None], INTERPRET), m_new, total


@triton.jit
def attend_masked(
    q, low, k, v, seen, acc, m, total, scale, PAIR: tl.constexpr, INTERPRET: tl.constexpr
):
    """The same for a block of which row i sees the keys seen[i]; k and v are 0 where unread."""
    scores = scores_of(q, low, k, PAIR, INTERPRET) * (scale[:, None] if PAIR else scale)
    scores = tl.where(seen, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    # a row that has seen nothing yet keeps m = -inf; -inf - -inf would be NaN
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(scores - base[:, None])
    alpha = tl.exp2(m - base)
    total = total * alpha + tl.sum(p, 1)
    v = values(v, tl.float16 if PAIR else q.dtype, INTERPRET)
    return dot_add(p, v, acc * alpha[:, None], INTERPRET), m_new, total


@triton.jit
def attend_clamped(q, k, v, exists, acc, m, total, scale_log2, INTERPRET: tl.constexpr):
    """`attend` for a block of which the keys exists [N] are seen, by every row and at least one."""
    scores = dot(q, tl.trans(k.to(q.dtype)), INTERPRET) * scale_log2
    scores = tl.where(exists[None, :], scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp2(scores - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    total = total * alpha + tl.sum(p, 1)
    acc = dot_add(p, values(v, q.dtype, INTERPRET), acc * alpha[:, None], INTERPRET)
    return acc, m_new, total


@triton.jit
def prefetch_rows(pointers):
    """Ask the L2 for the lines at pointers; nothing waits for them. Not for the interpreter."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_rows(base, offsets, d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [N, BLOCK_D] at base + offsets [N]; columns from D on are 0."""
    pointers = base + offsets[:, None] + d[None, :]
    if D == BLOCK_D:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=d[None, :] < D, other=0.0)


@triton.jit
def load_some_rows(base, offsets, keep, d, D: tl.constexpr):
    """The same for rows with keep [N]; the others are 0 and not read."""
    return tl.load(
        base + offsets[:, None] + d[None, :], mask=keep[:, None] & (d[None, :] < D), other=0.0
    )


@triton.jit
def store_state(o_ptr, lse_ptr, index, keep, acc, m, total, d, D: tl.constexpr):
    """State of each row: o [index, D] normalised, lse in base 2; without keys (0, -inf)."""
    empty = total == 0.0
    o = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), m + tl.log2(tl.where(empty, 1.0, total)))
    pointers = o_ptr + index.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(pointers, o, mask=keep[:, None] & (d[None, :] < D))
    tl.store(lse_ptr + index, lse, mask=keep)


@triton.jit
def start_dependents(PDL: tl.constexpr):
    """The next launch may start its prologue now; it still waits before it reads."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Everything the launch before wrote is visible after this."""
    if PDL:
        tl.extra.cuda.gdc_wait()
