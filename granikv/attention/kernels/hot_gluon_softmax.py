"""Softmax of the Gluon HOT kernel: one block's scores of a warpgroup, and its place among products.

Imported only where hot_gluon.py is.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
def softmax(
    scores, n0, seen_len, m, total, scale_log2, BLOCK_N: gl.constexpr, MASKED: gl.constexpr
):
    """Scores [64, N] of the keys from n0 on -> p, alpha, m, total."""
    if MASKED:
        LAYOUT: gl.constexpr = scores.type.layout
        n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        first = (n0 + BLOCK_N - 1) // BLOCK_N * BLOCK_N  # those before are the block before's
        scores = gl.where(
            (n >= first)[None, :] & (n[None, :] < seen_len[:, None]), scores, float("-inf")
        )
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
def pin(total):
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
