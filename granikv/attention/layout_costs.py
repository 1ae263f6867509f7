"""Constants of split_cost.py for each layout, in us, fitted to what one H200 measured.

Two sets a layout: head sizes up to 64, and above (`dense` and `even` need 128: their first set is
`large`'s). Fitted to candidates of the attention grid and the standard cases in bf16 (32 query heads,
GQA groups of 1, 4 and 8), by the logarithm of their times; those far from a point's best count less.
They err by 3% near a point's best and by 4% elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

MEASURED_BYTES_PER_US = 4.25 / 4.1  # of SmRates' bandwidth; times of reads are shares of it


@dataclass(frozen=True)
class LayoutCost:
    """launch: of all kernels of a layer.

    *_token: that a block takes for one token when nothing keeps it waiting; *_start: before its first;
    *_block: of the SM's time, for each block beyond its first. read, hot_reread, cold_read, reread: time of bytes that
    are read once, and again by other row tiles or rows (mostly from the L2), over that at full
    bandwidth. rate: of SmRates' matrix rate. turns: how much of an uneven last turn over the SMs is
    idle, where products bind. overlap: share of COLD's reads that such products do not hide while all
    HOT blocks run at once. bend: how soon the longest item counts
    beside the work, even_bend: later where items are of one length. *_tail: how much of
    a last, partly filled turn of *_per_sm blocks is lost. partial: to store and merge a state of head
    size 128; merge_turn: of a row's merge, one for every block_p states.
    unfilled: share of all by which HOT blocks that fill none of their turns are slower.
    """

    launch: float
    hot_token: float
    hot_start: float
    hot_block: float
    cold_token: float
    cold_start: float
    cold_block: float
    read: float
    hot_reread: float
    cold_read: float
    reread: float
    rate: float
    turns: float
    overlap: float
    bend: float
    even_bend: float
    hot_tail: float
    cold_tail: float
    partial: float
    merge_turn: float
    unfilled: float
    hot_per_sm: int
    cold_per_sm: int


# fmt: off
_LARGE_SMALL_HEADS = LayoutCost(
    6.26, 0.012, 1.23, 1.96, 0.0394, 0.711, 0.0614, 1.0, 0.121, 0.974, 0.3,
    0.918, 1.41, 0.547, 3.31, 0.277, 0.633, 0.161, 0.0242, 0.383, 0.0, 2, 4,
)
LAYOUT_COSTS: dict[str, tuple[LayoutCost, LayoutCost]] = {
    "flat": (
        LayoutCost(2.6, 0.0, 0.0, 0.0, 0.0317, 0.396, 0.186, 0.0, 0.0, 0.955, 0.215,
                   1.0, 0.0, 0.0, 1.88, 0.932, 0.0, 0.564, 0.0156, 0.445, 0.0, 1, 12),
        LayoutCost(3.37, 0.0, 0.0, 0.0, 0.0346, 0.548, 0.2, 0.0, 0.0, 0.944, 0.251,
                   1.0, 0.0, 0.0, 1.88, 0.623, 0.0, 0.478, 0.0124, 0.459, 0.0, 1, 8),
    ),
    "small": (
        LayoutCost(4.0, 0.00839, 0.732, 0.954, 0.0155, 0.197, 0.477, 0.923, 0.157, 1.02, 0.3,
                   0.924, 0.426, 0.685, 1.49, 0.116, 0.413, 0.447, 0.0188, 0.746, 0.0, 4, 10),
        LayoutCost(4.46, 0.0078, 1.4, 1.72, 0.018, 0.102, 0.93, 0.924, 0.162, 1.03, 0.3,
                   1.05, 0.0267, 0.779, 1.67, 0.251, 0.508, 0.541, 0.014, 1.79, 0.0, 2, 4),
    ),
    "mid": (
        LayoutCost(6.69, 0.00947, 0.862, 1.0, 0.0338, 0.618, 0.121, 0.934, 0.104, 0.975, 0.3,
                   0.938, 0.396, 0.186, 2.57, 0.195, 0.511, 0.0867, 0.016, 0.366, 0.0, 3, 6),
        LayoutCost(7.72, 0.00917, 1.37, 1.07, 0.0427, 0.611, 0.159, 0.946, 0.155, 0.93, 0.3,
                   1.06, 0.0217, 0.63, 1.69, 1.72, 0.341, 0.394, 0.0119, 0.47, 0.05, 2, 6),
    ),
    "large": (
        _LARGE_SMALL_HEADS,
        LayoutCost(9.71, 0.016, 0.263, 6.41, 0.051, 1.57, 0.282, 0.935, 0.0161, 0.961, 0.3,
                   1.21, 0.318, 0.0118, 2.69, 0.273, 0.378, 0.237, 0.00803, 0.0339, 0.0, 1, 6),
    ),
    "dense": (
        _LARGE_SMALL_HEADS,
        LayoutCost(9.75, 0.0134, 0.483, 6.06, 0.0399, 5.77, 0.28, 0.93, 0.179, 0.979, 0.3,
                   1.25, 0.306, 0.0168, 1.96, 0.578, 0.492, 0.132, 0.00648, 0.0698, 0.0, 1, 6),
    ),
    "even": (
        _LARGE_SMALL_HEADS,
        LayoutCost(7.91, 0.0153, 0.286, 4.85, 0.0478, 2.16, 0.304, 0.908, 0.0147, 0.969, 0.3,
                   1.28, 0.371, 0.00925, 2.22, 0.671, 0.513, 0.218, 0.01, 0.0501, 0.0, 1, 4),
    ),
    "groups": (
        LayoutCost(12.2, 0.0106, 0.915, 0.522, 0.037, 1.08, 0.212, 0.942, 0.192, 0.979, 0.3,
                   0.894, 0.586, 1.0, 2.0, 0.645, 0.446, 0.2, 0.0124, 0.494, 0.0, 3, 10),
        LayoutCost(8.06, 0.00839, 0.407, 0.661, 0.0382, 0.812, 0.368, 0.944, 0.193, 0.945, 0.3,
                   1.1, 1.23, 0.822, 1.62, 1.35, 0.454, 0.152, 0.0108, 0.507, 0.05, 2, 6),
    ),
    "many": (
        LayoutCost(5.29, 0.00944, 4.75, 0.445, 0.0325, 1.01, 0.115, 0.946, 0.28, 0.984, 0.3,
                   1.0, 0.5, 0.3, 2.27, 0.22, 0.444, 0.107, 0.0125, 0.45, 0.0, 4, 10),
        LayoutCost(6.37, 0.0108, 1.69, 0.524, 0.0309, 0.883, 0.202, 0.911, 0.276, 0.933, 0.3,
                   1.0, 0.5, 0.3, 1.54, 0.133, 0.873, 0.261, 0.00935, 0.342, 0.0, 3, 10),
    ),
    "short": (
        LayoutCost(12.1, 0.0131, 1.03, 0.629, 0.0315, 0.957, 0.15, 0.939, 0.151, 0.964, 0.3,
                   0.332, 0.559, 1.0, 2.24, 0.278, 0.404, 0.305, 0.0154, 0.379, 0.0, 4, 10),
        LayoutCost(8.61, 0.0168, 0.801, 1.51, 0.025, 0.615, 0.141, 0.904, 0.103, 0.938, 0.3,
                   0.417, 0.423, 0.438, 2.11, 0.636, 0.63, 0.319, 0.0159, 0.343, 0.0, 2, 4),
    ),
}
# fmt: on
