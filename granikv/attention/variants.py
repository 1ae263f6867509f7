"""The variant table: tiles of every kernel and the layouts that combine them.

Read by the just-in-time and the ahead-of-time build alike. Times in the comments are medians of
one attention layer on one H200 (32 query heads, 8 KV heads, head size 128, bf16).
It knows nothing of plans; splits.py picks a layout, gpu.py launches it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from granikv.errors import Unsupported

HEAD_DIMS = (64, 96, 128, 256)
MAX_GROUP_SIZE = 16
SHARED_MEMORY_BYTES = 227 * 1024  # a block's limit on sm_90
FIRST_WITH_DESCRIPTORS = 90  # compute capability (major * 10 + minor) of the copies they name
FIRST_WITH_DEPENDENT_LAUNCHES = 90
GLUON_CAPABILITIES = (90,)  # where the Gluon kernels were measured
GLUON_TRITON = ("3.6",)  # minor versions they were compiled and measured with
GLUON_HEAD_DIM = 128
KEYS_FIRST_TOKENS = 32  # of a block of the Gluon COLD kernel; its item cuts are COLD_THIN's
FIRST_WITH_FP8 = 89
FP8_PRODUCT_COLUMNS = 32  # of a head, the least that an FP8 product sums


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a layer on one kind of GPU.

    Raises Unsupported for a head size or a GQA group without a kernel.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int  # of q, and of KV unless fp8_kv: 2 or 4
    shared_memory_bytes: int = SHARED_MEMORY_BYTES  # a block's limit; the tiles are fitted to it
    fp8_kv: bool = False  # KV is stored as e4m3, one scale per layer for K and one for V

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS and self.head_dim not in (16, 32):  # tiny: tests
            raise Unsupported(f"head_dim: expected one of {HEAD_DIMS}, got {self.head_dim}")
        if self.num_qo_heads % self.num_kv_heads or self.group_size > MAX_GROUP_SIZE:
            raise Unsupported(
                f"heads: expected num_qo_heads = group * num_kv_heads with group in "
                f"1..{MAX_GROUP_SIZE}, got {self.num_qo_heads} and {self.num_kv_heads}"
            )

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def block_d(self) -> int:
        """head_dim padded to a power of two; the padding is masked, never read."""
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def kv_element_bytes(self) -> int:
        return 1 if self.fp8_kv else self.element_bytes

    @property
    def kv_type(self) -> str:
        """Triton's type of a stored K or V element; T: that of q."""
        return "fp8e4nv" if self.fp8_kv else "T"

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token and one KV head."""
        return 2 * self.head_dim * self.kv_element_bytes


@dataclass(frozen=True)
class HotTile:
    """block_m stacked rows (requests x GQA group) by block_n tokens."""

    block_m: int
    block_n: int
    num_stages: int
    num_warps: int
    max_registers: int | None = None  # per thread: leaves room for COLD blocks beside this one
    tma: bool = False  # load K and V by tensor descriptors
    prefetch_tokens: int = 0  # asked of the L2 at the start of a block

    def fit(self, shape: AttentionShape) -> HotTile:
        """This tile, with fewer stages and then fewer tokens until it fits shared memory."""
        tile = self
        if shape.element_bytes == 4:  # exact products run on the plain units: keep tiles small
            tile = replace(tile, block_m=min(64, tile.block_m), block_n=min(32, tile.block_n))
        while tile._shared_bytes(shape) > shape.shared_memory_bytes:
            if tile.num_stages > 2:
                tile = replace(tile, num_stages=tile.num_stages - 1)
            else:
                tile = replace(tile, block_n=tile.block_n // 2)
        return tile

    def takes_pairs(self, shape: AttentionShape) -> bool:
        """Whether FP8 K is multiplied as it is stored, by queries that are pairs of e4m3.

        Below 64 rows the older matrix instruction works from registers, where widening costs little;
        FP8's own takes 32 columns at a time.
        """
        wide_enough = shape.block_d >= FP8_PRODUCT_COLUMNS and self.block_m >= 64
        return shape.fp8_kv and shape.element_bytes == 2 and wide_enough

    def _shared_bytes(self, shape: AttentionShape) -> int:
        """Queries and all stages of K and V; FP8 blocks are widened in shared memory as well."""
        widened = (1 if self.takes_pairs(shape) else 2) if shape.fp8_kv else 0
        q_rows = self.block_m + widened * self.block_n
        stored = 2 * self.num_stages * self.block_n * shape.kv_element_bytes
        return (q_rows * shape.element_bytes + stored) * shape.block_d


@dataclass(frozen=True)
class ColdTile:
    """16 rows (the padded GQA group) by block_n gathered tokens."""

    block_n: int
    num_stages: int
    num_warps: int
    max_registers: int | None = None

    def fit(self, shape: AttentionShape) -> ColdTile:
        """This tile, with fewer stages and then fewer tokens until it fits shared memory."""
        tile = HotTile(16, self.block_n, self.num_stages, self.num_warps).fit(shape)
        return replace(self, block_n=tile.block_n, num_stages=tile.num_stages)


@dataclass(frozen=True)
class MergeTile:
    """block_p partials of one row and block_h heads at a time."""

    block_p: int
    block_h: int
    num_warps: int


@dataclass(frozen=True)
class GluonTile:
    """128 stacked rows by block_n tokens, of the Gluon HOT kernel.

    Registers of a thread: of the two warpgroups that multiply, and of all 12 warps at launch. What
    the launch leaves of a quarter SM's 16,384 is one COLD warp's: (512 - 3 launch) a thread.
    """

    block_n: int
    num_stages: int
    sum_registers: int
    launch_registers: int


@dataclass(frozen=True)
class Layout:
    """How a decode step is launched, and the numbers by which the planner cuts its work.

    hot serves all HOT items, of both variants.
    one_launch: HOT and COLD items in one launch with the tile `hot`; else on two streams.
    hot_slots_per_sm: HOT blocks that an SM works on at a time; cold_slots_per_sm likewise: by these
    FP8 KV is cut (fill_once.py).
    hot_gluon: where the Gluon kernels are taken, HOT items have this tile and not `hot`.
    gluon_blocks_per_sm: COLD blocks per SM of a step from which the Gluon kernel serves them, with at
    most gluon_registers a thread.
    """

    name: str
    hot: HotTile
    cold: ColdTile
    merge: MergeTile
    hot_slots_per_sm: float
    cold_slots_per_sm: float
    one_launch: bool = False
    cold_first: bool = False
    min_hot_tokens: int = 128
    hot_gluon: GluonTile | None = None
    gluon_blocks_per_sm: float | None = None
    gluon_registers: int | None = None
    max_cold_tokens: int = 2048  # one warp with 4096: 5% slower [64 rows of 16,384: 1,000 us, 954]


# The numbers in brackets are steady times of one layer with 16,384 shared and 512 own tokens.
#
# Two M64 blocks or one M128 block fill an SM. M128 with tensor descriptors and at most 168
# registers (no spill) leaves room for four one-warp COLD blocks: [B=256 194 us; the same without
# the cap 203, with plain copies 210, M64 220]. Descriptors alone give 5% when compute-bound.
# M16 and M32 run on the older matrix instruction: 3 times slower from 128 stacked rows on, and no
# faster when memory-bound [B=8: M32 30.8 us, M64 29.3].
M16 = HotTile(16, 64, 3, 2)
M32 = HotTile(32, 64, 3, 4)
M64 = HotTile(64, 64, 3, 4, tma=True)
M64_AHEAD = HotTile(64, 64, 3, 4, prefetch_tokens=256)
M128 = HotTile(128, 64, 3, 8, max_registers=168, tma=True, prefetch_tokens=128)
GLUON_WIDE = GluonTile(128, 3, sum_registers=192, launch_registers=136)
GLUON_NARROW = GluonTile(64, 4, sum_registers=176, launch_registers=128)
EXTEND = HotTile(128, 64, 3, 8)
EXTEND_WIDE_HEAD = HotTile(64, 32, 2, 4)  # its loops share no buffers: 160 KB at head size 256
# 20 KB and one warp, for the room beside HOT blocks [B=128 105 us; N16 117, N64 117, two warps 119]
COLD_THIN = ColdTile(32, 4, 1)
COLD_PAIR = ColdTile(32, 4, 2)
COLD_WIDE = ColdTile(64, 3, 2)  # when COLD has the SM for itself
MERGE = MergeTile(4, 1, 1)  # few partials a row: one warp per head [B=256: four warps cost 5 us]
MERGE_MANY = MergeTile(32, 1, 2)  # small steps are split most: up to 20 partials a row

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        # one warp wins also alone where contexts are short [256 rows of 208 tokens: 70 us, two
        # warps 75], and is level where they are long
        Layout("flat", M16, COLD_THIN, MERGE, 1, 4),
        Layout("small", M64_AHEAD, COLD_WIDE, MERGE_MANY, 1.25, 2, one_launch=True),
        Layout("mid", M64, COLD_THIN, MERGE, 1, 2),
        # five COLD blocks of the Gluon kernel fit beside M128, four of COLD_THIN [B=256 188.5 us
        # for 198.3, B=128 105.7 for 107.0; but B=64, of four COLD blocks per SM in all, 64.6 for 63.1]
        Layout("large", M128, COLD_THIN, MERGE, 1, 1, gluon_blocks_per_sm=6),
        # In Gluon HOT alone takes 131 us of B=256 for 158. A wide tile is fastest where COLD is
        # little [208 own tokens, B=64, 128, 256: 51.5, 82.3, 151 us, M128 54.5, 89.9, 165]; where
        # COLD takes as long, it wants the registers [512 own: 62.9, 99.6, 184, M128 62.7, 104.8, 189].
        Layout(
            "dense",
            M128,
            COLD_THIN,
            MERGE,
            1,
            1,
            min_hot_tokens=256,
            hot_gluon=GLUON_WIDE,
            gluon_blocks_per_sm=0,
            gluon_registers=104,
        ),
        Layout(
            "even",
            M128,
            COLD_THIN,
            MERGE,
            1,
            1,
            min_hot_tokens=256,
            hot_gluon=GLUON_NARROW,
            gluon_blocks_per_sm=0,
        ),
        # memory-bound HOT: two blocks per SM; COLD first, or it would wait for all of HOT
        Layout("groups", M64, COLD_PAIR, MERGE, 2, 4, cold_first=True),
        Layout("many", M16, COLD_THIN, MERGE, 4, 4),
        # HOT much shorter than COLD: small blocks that fit in between
        Layout("short", M32, COLD_WIDE, MERGE, 1, 4),
    )
}

# FP8 KV: K is multiplied as it is stored, V widened by way of shared memory. M128 does that once for
# twice the rows, and beside it fit five COLD warps of 128 registers a thread, worth their spill [B=128
# 120 us; 144 a thread 123, 168 127]. Two M64 blocks with wide tiles do not fit an SM [8 groups 120 us;
# N128 144].
FP8_WIDE = HotTile(64, 128, 3, 4, tma=True)
FP8_M16 = HotTile(16, 64, 2, 1)  # [64 groups 221 us; M16 233]
FP8_THIN = replace(
    COLD_THIN, max_registers=168
)  # the least without a spill, where no item is a run
FP8_BESIDE = replace(COLD_THIN, max_registers=128)
FP8_DEEP = ColdTile(32, 6, 1)  # COLD alone [64 rows of 16,384: 556 us; FP8_THIN 632]
_FP8_LARGE = replace(LAYOUTS["large"], hot=replace(M128, max_registers=176), cold=FP8_BESIDE)
FP8_LAYOUTS = LAYOUTS | {
    "flat": replace(LAYOUTS["flat"], cold=FP8_DEEP),
    "mid": replace(LAYOUTS["mid"], hot=FP8_WIDE, cold=FP8_THIN),
    "large": _FP8_LARGE,
    "dense": replace(_FP8_LARGE, name="dense"),
    "even": replace(_FP8_LARGE, name="even"),
    "groups": replace(LAYOUTS["groups"], cold=COLD_THIN),
    "many": replace(LAYOUTS["many"], hot=FP8_M16, cold=FP8_THIN),
}


def layouts_of(shape: AttentionShape) -> dict[str, Layout]:
    """The layouts by name, the same names for all shapes."""
    return FP8_LAYOUTS if shape.fp8_kv else LAYOUTS


def takes_descriptors(tile: HotTile, shape: AttentionShape, capability: int) -> bool:
    """Whether the tile loads K and V by descriptors on a GPU of this compute capability."""
    # the padding of a head would read the next one
    whole_heads = shape.head_dim == shape.block_d
    return tile.tma and whole_heads and capability >= FIRST_WITH_DESCRIPTORS


def takes_gluon(shape: AttentionShape, capability: int, triton_version: str) -> bool:
    """Whether the Gluon kernels serve these heads in bf16 on this GPU, with this Triton."""
    known = capability in GLUON_CAPABILITIES and triton_version.startswith(
        tuple(f"{minor}." for minor in GLUON_TRITON)
    )
    return known and shape.head_dim == GLUON_HEAD_DIM and shape.element_bytes == 2


def extend_tile(shape: AttentionShape) -> HotTile:
    """The tile of extend_attention for these heads."""
    return (EXTEND_WIDE_HEAD if shape.block_d > 128 else EXTEND).fit(shape)
