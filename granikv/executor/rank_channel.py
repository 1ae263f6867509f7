"""Memory that the engine's process shares with its ranks: plans one way, digests the other.

    engine's process   message -> pieces -> ring of slots  --- read by every rank
                       compares <- digests of plans and ids --- written by every rank

It is an anonymous file that the ranks inherit: without a name, nothing is left of it however its
processes end. It does not know what a message is.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from enum import IntEnum

import numpy as np

from granikv.errors import Unavailable

SLOTS, SLOT_BYTES = 8, 2**18  # a usual plan takes one; prompts and long moves take several
DEPTH = 16  # digests kept of each kind; at most two steps are under way


class Digest(IntEnum):
    """What ranks must agree on."""

    PLAN = 0
    IDS = 1


class RankChannel:
    """One ring for all ranks. memory: descriptor; wakes: an eventfd (semaphore) for each rank.

    rank: of the reader; None: the writer. Use `create` for the writer's.
    """

    def __init__(self, memory: int, wakes: list[int], rank: int | None = None):
        self.memory, self.wakes, self.rank = memory, wakes, rank
        num_ranks = len(wakes)
        self._map = mmap.mmap(memory, _header_words(num_ranks) * 8 + SLOTS * SLOT_BYTES)
        words = np.frombuffer(self._map, np.int64, _header_words(num_ranks))
        self._totals = words[:SLOTS]  # bytes of the whole message that a slot holds a piece of
        self._num_read = words[SLOTS : SLOTS + num_ranks]  # pieces, by rank
        digests = words[SLOTS + num_ranks :]
        # [..., 0]: 1 + number of the message or ids; [..., 1]: their digest
        self._digests = digests.reshape(len(Digest), DEPTH, num_ranks, 2)
        self._slots = memoryview(self._map)[_header_words(num_ranks) * 8 :]
        self._num_pieces = 0
        self._num_compared = [0] * len(Digest)
        self._num_noted = [0] * len(Digest)

    @classmethod
    def create(cls, num_ranks: int) -> RankChannel:
        memory = os.memfd_create("granikv_plans")
        os.ftruncate(memory, _header_words(num_ranks) * 8 + SLOTS * SLOT_BYTES)
        wakes = [os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC) for _ in range(num_ranks)]
        return cls(memory, wakes)

    def send(self, content: bytes, wait: Callable[[], None]) -> None:
        """One message to every rank. wait is called, and may raise, while a rank has a full ring
        yet to read."""
        for first in range(0, len(content), SLOT_BYTES):
            while self._num_pieces - int(self._num_read.min()) >= SLOTS:
                wait()
            piece = content[first : first + SLOT_BYTES]
            slot = self._num_pieces % SLOTS
            self._slots[slot * SLOT_BYTES : slot * SLOT_BYTES + len(piece)] = piece
            self._totals[slot] = len(content)
            self._num_pieces += 1
            for wake in self.wakes:
                os.eventfd_write(wake, 1)

    def receive(self) -> bytes:
        """The next message; waits for it."""
        content = bytearray()
        while True:
            os.eventfd_read(self.wakes[self._reader])
            slot = self._num_pieces % SLOTS
            total = int(self._totals[slot])
            size = min(SLOT_BYTES, total - len(content))
            content += self._slots[slot * SLOT_BYTES : slot * SLOT_BYTES + size]
            self._num_pieces += 1
            self._num_read[self._reader] = self._num_pieces
            if len(content) == total:
                return bytes(content)

    @property
    def _reader(self) -> int:
        assert self.rank is not None, "the writer reads nothing"
        return self.rank

    def note(self, kind: Digest, digest: int) -> None:
        """This rank's digest of its next plan, or of its next ids."""
        entry = self._digests[kind, self._num_noted[kind] % DEPTH, self._reader]
        self._num_noted[kind] += 1
        entry[1] = digest
        entry[0] = self._num_noted[kind]  # last: with it the entry counts

    def compare(self) -> None:
        """Raises Unavailable when ranks differ in what all of them have noted."""
        for kind in Digest:
            while True:
                number = self._num_compared[kind]
                entries = self._digests[kind, number % DEPTH].copy()  # no view in a traceback
                if (entries[:, 0] != number + 1).any():
                    break
                digests = [f"{value:08x}" for value in entries[:, 1].tolist()]
                if len(set(digests)) > 1:
                    what = "plan" if kind is Digest.PLAN else "sampled ids"
                    raise Unavailable(
                        f"ranks: expected one {what} in step {number}, got digests {digests} by "
                        "rank; restart the engine"
                    )
                self._num_compared[kind] += 1

    def close(self) -> None:
        del self._totals, self._num_read, self._digests  # views, which keep the map open
        self._slots.release()
        with contextlib.suppress(BufferError):  # somebody's traceback has a view: it ends with that
            self._map.close()
        for descriptor in (self.memory, *self.wakes):
            os.close(descriptor)


def _header_words(num_ranks: int) -> int:
    return SLOTS + num_ranks + len(Digest) * DEPTH * num_ranks * 2
