"""Workloads of the benchmarks: request traces with prefix block ids, and shared-prefix prompts.

A trace names the blocks of a prompt; equal ids mean equal tokens. Each block id stands for a run
of token ids of its own, so that every cache under test sees real tokens and finds sharing itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from granikv.errors import InvalidArgument

OUTPUT_TOKEN_BASE = 2**30  # output tokens are private to a request: ids above every block's
TAIL_TOKEN_BASE = 2**31 - 2**25  # prompt tokens behind the last named block, private as well


@dataclass(frozen=True)
class TraceRequest:
    timestamp_s: float
    input_length: int  # tokens
    output_length: int  # tokens
    block_ids: tuple[int, ...]  # of the prompt; the last block may be partial or not be named
    index: int = 0  # in the file


@dataclass(frozen=True)
class Trace:
    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]  # by arrival

    def prompt_token_ids(self, request: TraceRequest) -> np.ndarray:
        """int32 [input_length]: block b is the ids [b * block_tokens, (b + 1) * block_tokens)."""
        starts = np.asarray(request.block_ids, dtype=np.int64)[:, None] * self.block_tokens
        ids = (starts + np.arange(self.block_tokens)).reshape(-1)[: request.input_length]
        tail = np.arange(request.input_length - len(ids))
        tail += TAIL_TOKEN_BASE + request.index * self.block_tokens
        return np.concatenate([ids, tail]).astype(np.int32)


def load_trace(path: str | Path, block_tokens: int = 0, max_requests: int = 0) -> Trace:
    """Read Mooncake's JSON lines or aiperf's JSON with block ranges.

    block_tokens: 0 takes what every full prompt of the file implies (16 or 512). max_requests: 0
    keeps all. Raises InvalidArgument with the file and line for a record that is not usable.
    """
    path = Path(path)
    if not path.is_file():
        raise InvalidArgument("trace", str(path), "an existing file")
    if path.suffix == ".jsonl":
        requests = _read_jsonl(path, max_requests)
    else:
        requests = _read_ranges(path, max_requests)
    if not requests:
        raise InvalidArgument("trace", str(path), "at least one request")
    block_tokens = block_tokens or _implied_block_tokens(requests)
    for index, request in enumerate(requests):
        highest = (len(request.block_ids) + 1) * block_tokens - 1
        if not 0 < request.input_length <= highest:
            raise InvalidArgument(
                f"{path.name}, request {index}: input_length",
                request.input_length,
                f"1 to {highest} tokens ({len(request.block_ids)} blocks of {block_tokens})",
            )
        if max(request.block_ids, default=0) >= OUTPUT_TOKEN_BASE // block_tokens:
            raise InvalidArgument(
                f"{path.name}, request {index}: hash_ids",
                max(request.block_ids, default=0),
                f"ids below {OUTPUT_TOKEN_BASE // block_tokens}",
            )
    requests.sort(key=lambda request: request.timestamp_s)
    return Trace(path.stem, block_tokens, tuple(requests))


def _read_jsonl(path: Path, max_requests: int) -> list[TraceRequest]:
    requests: list[TraceRequest] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidArgument(path.name, str(error), "UTF-8 text") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            requests.append(
                TraceRequest(
                    float(record["timestamp"]) / _timestamp_unit(record),
                    int(record["input_length"]),
                    int(record["output_length"]),
                    tuple(int(block) for block in record["hash_ids"]),
                    len(requests),
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            expected = "timestamp, input_length, output_length and hash_ids"
            raise InvalidArgument(f"{path.name}, line {number}", repr(error), expected) from None
        if max_requests and len(requests) == max_requests:
            break
    return requests


def _timestamp_unit(record: dict) -> float:
    """Mooncake counts milliseconds; the traces by agent count seconds."""
    return 1.0 if "agent" in record else 1000.0


def _read_ranges(path: Path, max_requests: int) -> list[TraceRequest]:
    """First turns with inclusive block ranges; sessions arrive one second apart."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        requests = [
            TraceRequest(
                float(index),
                int(row["input_length"]),
                int(row["output_length"]),
                tuple(b for first, last in row["ranges"] for b in range(first, last + 1)),
                index,
            )
            for index, row in enumerate(rows)
        ]
    except (KeyError, TypeError, ValueError) as error:
        expected = "rows with input_length, output_length and ranges"
        raise InvalidArgument(path.name, repr(error), expected) from None
    return requests[:max_requests] if max_requests else requests


def _implied_block_tokens(requests: Sequence[TraceRequest]) -> int:
    """The smallest usual block size under which every prompt ends within one block of its names.

    Some traces name a partial last block, others only full ones.
    """
    for size in (16, 32, 64, 128, 256, 512, 1024):
        if all(r.input_length < (len(r.block_ids) + 1) * size for r in requests):
            return size
    raise InvalidArgument("block_tokens", 0, "a trace with at most 1024 tokens per block")


def shared_prefix_prompts(
    group_sizes: Sequence[int], prefix_len: int, suffix_len: int, vocab_size: int, seed: int = 0
) -> list[list[int]]:
    """Random token ids: requests of a group share prefix_len tokens, suffixes are private."""
    rng = np.random.default_rng(seed)
    low = min(1000, vocab_size // 2)  # ids below are often special tokens
    prompts = []
    for size in group_sizes:
        prefix = rng.integers(low, vocab_size, prefix_len).tolist()
        prompts += [
            prefix + rng.integers(low, vocab_size, suffix_len).tolist() for _ in range(size)
        ]
    return prompts
