"""A list of requests with arrival times: agents of several groups, each with a prefix of its own.

Times are in mean gaps, so that one list serves every load: divided by a rate they are seconds. The
list is a JSON file; token ids are not in it, they follow from its seed. Every contender is sent the
same list.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from granikv.errors import InvalidArgument


@dataclass(frozen=True)
class Arrival:
    time: float  # mean gaps since the start
    group: int
    suffix_len: int  # tokens behind the group's prefix
    output_len: int  # tokens


@dataclass(frozen=True)
class ArrivalList:
    seed: int
    prefix_lens: tuple[int, ...]  # tokens, by group
    arrivals: tuple[Arrival, ...]  # by time

    @property
    def longest(self) -> int:
        """Prompt and output of the longest request, tokens."""
        return max(self.prefix_lens[a.group] + a.suffix_len + a.output_len for a in self.arrivals)

    @property
    def num_output_tokens(self) -> int:
        return sum(arrival.output_len for arrival in self.arrivals)

    def due_s(self, rate: float) -> list[float]:
        """Seconds since the start at `rate` requests per second; inf: all at once."""
        return [arrival.time / rate for arrival in self.arrivals]

    def prompts(self, vocab_size: int, run: int) -> list[list[int]]:
        """Token ids: prefixes are the same in every run, suffixes never."""
        low = min(1000, vocab_size // 2)  # ids below are often special tokens

        def tokens(length: int, *seed: int) -> list[int]:
            rng = np.random.default_rng((self.seed, *seed))
            return rng.integers(low, vocab_size, length).tolist()

        prefixes = [tokens(length, 0, group) for group, length in enumerate(self.prefix_lens)]
        return [
            prefixes[a.group] + tokens(a.suffix_len, 1, run, index)
            for index, a in enumerate(self.arrivals)
        ]


def make_arrivals(
    num_requests: int, prefix_lens: Sequence[int], suffix_len: int, output_len: int, seed: int = 0
) -> ArrivalList:
    """Poisson arrivals; groups are drawn alike, suffixes and outputs between half and 1.5 times
    the length given. Raises InvalidArgument for a number below 1."""
    for name, value in (
        ("num_requests", num_requests), ("prefix_len", min(prefix_lens, default=0)),
        ("suffix_len", suffix_len), ("output_len", output_len),
    ):  # fmt: skip
        if value < 1:
            raise InvalidArgument(name, value, "at least 1")
    rng = np.random.default_rng(seed)

    def lengths(mean: int) -> list[int]:
        return rng.integers((mean + 1) // 2, mean + mean // 2, num_requests, endpoint=True).tolist()

    columns = (
        np.cumsum(rng.exponential(1.0, num_requests)).tolist(),
        rng.integers(0, len(prefix_lens), num_requests).tolist(),
        lengths(suffix_len),
        lengths(output_len),
    )
    arrivals = tuple(Arrival(*row) for row in zip(*columns, strict=True))
    return ArrivalList(seed, tuple(prefix_lens), arrivals)


def write_arrivals(arrivals: ArrivalList, path: Path) -> None:
    path.write_text(json.dumps(asdict(arrivals)) + "\n", encoding="utf-8")


def parse_arrivals(record: dict, source: str) -> ArrivalList:
    """record: what write_arrivals wrote. Raises InvalidArgument with the source and request."""
    try:
        prefix_lens = tuple(int(length) for length in record["prefix_lens"])
        arrivals = tuple(Arrival(**fields) for fields in record["arrivals"])
        found = ArrivalList(int(record["seed"]), prefix_lens, arrivals)
    except (KeyError, TypeError, ValueError) as error:
        expected = "an object with seed, prefix_lens and arrivals"
        raise InvalidArgument(source, repr(error), expected) from None
    if not arrivals or min(prefix_lens, default=0) < 1:
        raise InvalidArgument(source, len(arrivals), "requests, and prefixes of 1 token or more")
    before = 0.0
    for index, a in enumerate(arrivals):
        usable = (
            0 <= a.group < len(prefix_lens)
            and min(a.suffix_len, a.output_len) >= 1
            and before <= a.time < math.inf
        )
        if not usable:
            expected = f"a group below {len(prefix_lens)}, lengths above 0, times that never fall"
            raise InvalidArgument(f"{source}: request {index}", a, expected)
        before = a.time
    return found


def read_arrivals(path: Path) -> ArrivalList:
    """Raises InvalidArgument."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument("arrivals", str(path), f"a JSON file ({error})") from None
    return parse_arrivals(record, path.name)
