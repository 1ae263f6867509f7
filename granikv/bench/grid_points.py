"""The fixed grid of the attention benchmark: 240 decode steps over all shapes that matter.

    python -m granikv.bench.grid_points        writes grid_points.json anew, the same bytes

40 points for each of (GQA group, head size), in this order, so that a slice of the file needs few
kernels. Of the 40: the corners of prefix, batch, groups and suffix that fit the memory, equal
lengths; then a Latin hypercube with ragged ones. Only random.Random.random is used: it is stable.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from granikv.attention.variants import AttentionShape
from granikv.bench.attention_step import AttentionCase
from granikv.errors import InvalidArgument

POINTS_FILE = Path(__file__).parent / "grid_points.json"
NUM_QO_HEADS = 32
GQA_GROUPS, HEAD_DIMS = (1, 4, 8), (64, 128)
PREFIX, BATCH, GROUPS, SUFFIX = (128, 65536), (1, 512), (1, 64), (16, 8192)  # ranges, inclusive
POINTS_PER_SHAPE = 40
MAX_POINT_BYTES = 36 * 2**30  # unique KV of one layer: beside FlashInfer's view it fits 80 GB
RAGGED = (0.5, 1.5)  # of the nominal length
SEED = 20261130


@dataclass(frozen=True)
class GridPoint:
    """One line of the file. groups: (prefix tokens, requests); suffix_len as AttentionCase has it."""

    index: int
    kind: str  # corner or hypercube
    gqa_group: int
    head_dim: int
    groups: tuple[tuple[int, int], ...]
    suffix_len: int | tuple[int, ...]

    @cached_property
    def case(self) -> AttentionCase:
        return AttentionCase(self.name, self.groups, self.suffix_len)

    @property
    def name(self) -> str:
        return f"grid_{self.index:03d}"

    @property
    def shape(self) -> AttentionShape:
        """bf16."""
        return AttentionShape(NUM_QO_HEADS, NUM_QO_HEADS // self.gqa_group, self.head_dim, 2)

    @property
    def kv_bytes(self) -> int:
        """Unique KV of one layer."""
        return self.case.unique_tokens * self.shape.kv_bytes_per_token * self.shape.num_kv_heads


def make_points() -> list[GridPoint]:
    """The 240 points; the same on every machine."""
    points: list[GridPoint] = []
    for number, (gqa, dim) in enumerate(itertools.product(GQA_GROUPS, HEAD_DIMS)):
        rng = random.Random(SEED + number)
        corners = [
            point
            for corner in itertools.product(BATCH, GROUPS, PREFIX, SUFFIX)
            if (point := _corner(gqa, dim, *corner)) is not None
        ]
        rest = POINTS_PER_SHAPE - len(corners)
        units = [_strata(rest, rng) for _ in range(4)]
        made = corners + [_ragged(gqa, dim, unit, rng) for unit in zip(*units, strict=True)]
        points += [
            GridPoint(len(points) + i, p.kind, gqa, dim, p.groups, p.suffix_len)
            for i, p in enumerate(made)
        ]
    return points


def _corner(
    gqa: int, dim: int, batch: int, groups: int, prefix: int, suffix: int
) -> GridPoint | None:
    """None where there are more groups than requests, or more KV than memory."""
    if groups > batch:
        return None
    point = GridPoint(0, "corner", gqa, dim, ((prefix, batch // groups),) * groups, suffix)
    return point if point.kv_bytes <= MAX_POINT_BYTES else None


def _strata(count: int, rng: random.Random) -> list[float]:
    """One number of [0, 1) in each of `count` equal intervals, in random order."""
    values = [(i + rng.random()) / count for i in range(count)]
    return sorted(values, key=lambda value: rng.random())


def _log_between(limits: tuple[int, int], unit: float) -> int:
    low, high = limits
    return min(high, max(low, round(low * (high / low) ** unit)))


def _ragged(gqa: int, dim: int, unit: tuple[float, ...], rng: random.Random) -> GridPoint:
    """unit: of prefix, batch, groups and suffix, each logarithmic; shorter until it fits."""
    prefix, suffix = _log_between(PREFIX, unit[0]), _log_between(SUFFIX, unit[3])
    batch = _log_between(BATCH, unit[1])
    groups = min(batch, _log_between(GROUPS, unit[2]))
    ends = sorted(range(1, batch), key=lambda i: rng.random())[: groups - 1]
    edges = [0, *sorted(ends), batch]
    sizes = [b - a for a, b in itertools.pairwise(edges)]
    spread = [_jitter(rng) for _ in range(groups + batch)]
    while True:
        prefixes = [_clip(PREFIX, prefix * factor) for factor in spread[:groups]]
        suffixes = tuple(_clip(SUFFIX, suffix * factor) for factor in spread[groups:])
        point = GridPoint(
            0, "hypercube", gqa, dim, tuple(zip(prefixes, sizes, strict=True)), suffixes
        )
        if point.kv_bytes <= MAX_POINT_BYTES:
            return point
        prefix, suffix = round(prefix * 0.8), round(suffix * 0.8)


def _jitter(rng: random.Random) -> float:
    return RAGGED[0] + (RAGGED[1] - RAGGED[0]) * rng.random()


def _clip(limits: tuple[int, int], length: float) -> int:
    return min(limits[1], max(limits[0], round(length)))


def format_points(points: list[GridPoint]) -> str:
    """A JSON list, a point a line."""
    lines = [json.dumps(asdict(point), separators=(",", ":")) for point in points]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def load_points() -> list[GridPoint]:
    """The committed ones."""
    made = []
    for fields in json.loads(POINTS_FILE.read_text(encoding="utf-8")):
        fields["groups"] = tuple((n, size) for n, size in fields["groups"])
        if isinstance(fields["suffix_len"], list):
            fields["suffix_len"] = tuple(fields["suffix_len"])
        made.append(GridPoint(**fields))
    return made


def slice_points(points: list[GridPoint], text: str | None) -> list[GridPoint]:
    """A:B as Python slices have it, one of them may be absent; None is all. Raises
    InvalidArgument."""
    if text is None:
        return points
    parts = text.split(":")
    try:
        start, end = (int(part) if part else None for part in parts)
    except ValueError:
        raise InvalidArgument("--points", text, "two numbers, like 0:40") from None
    chosen = points[start:end]
    if not chosen:
        raise InvalidArgument("--points", text, f"some of the points 0:{len(points)}")
    return chosen


if __name__ == "__main__":
    POINTS_FILE.write_text(format_points(make_points()), encoding="utf-8")
