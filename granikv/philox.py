"""Random numbers that depend on a seed and a position alone, and on nothing that ran before.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

_MASK32 = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))


def philox4x32(counter: np.ndarray, key: np.ndarray, rounds: int = 10) -> np.ndarray:
    """counter uint32 [N, 4], key uint32 [N, 2] -> random uint32 [N, 4]."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[:, i].astype(np.uint64) for i in range(2))
    for _ in range(rounds):
        low, high = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (high >> np.uint64(32)) ^ c1 ^ k0,
            high & _MASK32,
            (low >> np.uint64(32)) ^ c3 ^ k1,
            low & _MASK32,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniform(
    seeds: Sequence[int] | np.ndarray, output_positions: Sequence[int] | np.ndarray
) -> np.ndarray:
    """float64 [N] in [0, 1), one per (64-bit seed, output position)."""
    seed = np.asarray(seeds, dtype=np.uint64)
    key = np.stack([seed & _MASK32, seed >> np.uint64(32)], axis=1).astype(np.uint32)
    counter = np.zeros((len(seed), 4), dtype=np.uint32)
    counter[:, 0] = np.asarray(output_positions, dtype=np.uint32)
    bits = philox4x32(counter, key).astype(np.uint64)
    return ((bits[:, 0] >> np.uint64(5)) * 67108864.0 + (bits[:, 1] >> np.uint64(6))) / 2.0**53


def seed_of_text(text: str, seed_default: int = 0) -> int:
    """A stable 64-bit seed for a request that gives none."""
    material = f"{seed_default}\0{text}".encode()
    return int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "little")
