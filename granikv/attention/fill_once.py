"""Layout and cuts of FP8 KV: by thresholds, and so that all blocks run at once.

The model of split_cost.py was fitted to 16-bit KV. Widening FP8 costs what it does not know: its cuts
were up to 1.4 times slower on an H200. Pure numpy, no loop over requests.
"""

from __future__ import annotations

import numpy as np

from granikv.attention.variants import GLUON_WIDE, AttentionShape, Layout, layouts_of

MIN_COLD_TOKENS = 128  # below, a block's start-up (index, K, first product) is its time
SHORT_SHARE = 0.25  # HOT is "short" below this share of COLD's time
DENSE_SHARE, EVEN_SHARE = 0.6, 1.3  # of COLD's time in HOT's, where a group is large
SMALL_ROWS = 48  # stacked, up to which a step is one launch
CUTS = np.concatenate([np.arange(1, 65), np.arange(68, 257, 4)])  # numbers tried


def layout_by_rules(
    num_rows: np.ndarray,
    hot_lengths: np.ndarray,
    cold_lengths: np.ndarray,
    shape: AttentionShape,
    num_sms: int,
    flop_per_us: float,
    bytes_per_us: float,
) -> tuple[Layout, str]:
    """The layout for at least one HOT span, and the reason. num_rows: of each; rates: of an SM."""
    layouts, stacked = layouts_of(shape), num_rows * shape.group_size
    most, heads = int(stacked.max()), shape.num_kv_heads
    token_us = shape.kv_bytes_per_token * heads / (bytes_per_us * num_sms)
    flop = 4 * float(stacked @ hot_lengths) * heads * shape.head_dim
    hot_us = max(flop / (flop_per_us * num_sms), float(hot_lengths.sum()) * token_us)
    cold_us = float(cold_lengths.sum()) * token_us
    if hot_us < SHORT_SHARE * cold_us:
        return layouts["short"], f"short: HOT {hot_us:.1f} us beside COLD {cold_us:.1f} us"
    if most > 128:
        share = cold_us / hot_us
        name = "dense" if share <= DENSE_SHARE else "even" if share <= EVEN_SHARE else "large"
        if hot_lengths.min() < GLUON_WIDE.block_n:
            name = "large"
        reason = f"{name}: {most} stacked rows, above 128; COLD takes {share:.2f} of HOT's time"
        return layouts[name], reason
    if most <= 64 and 3 * len(stacked) * heads >= num_sms:
        name = "many" if most <= 16 else "groups"
        return layouts[name], f"{name}: {len(stacked)} groups of at most {most} stacked rows"
    if most > SMALL_ROWS:
        return layouts["mid"], f"mid: {most} stacked rows, above {SMALL_ROWS}"
    return layouts["small"], f"small: {most} stacked rows, at most {SMALL_ROWS}"


def fill_once(
    layout: Layout,
    hot_lengths: np.ndarray,
    tiles: np.ndarray,
    cold_lengths: np.ndarray,
    shape: AttentionShape,
    num_sms: int,
) -> tuple[int, int]:
    """Tokens of a HOT and of a COLD item. tiles: blocks of a KV head for each HOT span."""
    heads = shape.num_kv_heads
    hot = cut_tokens(
        hot_lengths,
        tiles * heads,
        num_sms * layout.hot_slots_per_sm,
        layout.min_hot_tokens,
        1 << 30,
    )
    cold = cut_tokens(
        cold_lengths, np.full(len(cold_lengths), heads), num_sms * layout.cold_slots_per_sm,
        MIN_COLD_TOKENS, layout.max_cold_tokens,
    )  # fmt: skip
    return hot, cold


def cut_tokens(
    lengths: np.ndarray, blocks: np.ndarray, slots: float, shortest: int, longest: int
) -> int:
    """Tokens per item such that all blocks run at once: the fewest with at most `slots` blocks.

    lengths [n] tokens; blocks int [n]: blocks that one cut of the span gives. When uncut
    spans are already more than `slots`, no item is longer than a slot's share of the whole.
    """
    top = int(lengths.max(initial=1))
    if int(blocks.sum()) <= slots:
        candidates = np.unique(np.maximum(-(-top // CUTS), shortest)).astype(np.int32)
        different, of_length = np.unique(lengths.astype(np.int32), return_inverse=True)
        weights = np.bincount(of_length, weights=blocks)  # spans of one length count together
        counts = -(-different[None, :] // candidates[:, None]) @ weights
        tokens = int(candidates[np.argmax(counts <= slots)]) if (counts <= slots).any() else top
    else:
        tokens = int(np.ceil((lengths * blocks).sum() / max(slots, 1)))
    return int(np.clip(tokens, shortest, max(shortest, longest)))
