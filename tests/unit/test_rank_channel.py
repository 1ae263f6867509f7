"""The memory between an engine's process and its ranks: the ring and the digests, in one process."""

from __future__ import annotations

import os
import threading
import time

import pytest

from granikv.errors import Unavailable
from granikv.executor.rank_channel import SLOT_BYTES, SLOTS, Digest, RankChannel


class Full(Exception):
    pass


def full() -> None:
    raise Full


@pytest.fixture
def channels():
    """The writer's, and those of two ranks on the same memory."""
    writer = RankChannel.create(2)
    yield writer, [RankChannel(writer.memory, writer.wakes, rank) for rank in range(2)]
    writer.close()


def test_messages_longer_than_the_ring_arrive_whole(channels):
    """The writer waits for the slower rank; a piece that it overwrote would show."""
    writer, readers = channels
    messages = [os.urandom(3 * SLOTS * SLOT_BYTES + 5), b"x", os.urandom(2 * SLOT_BYTES)]
    was_full = threading.Event()
    received: list[list[bytes]] = [[], []]

    def read(rank: int) -> None:
        if rank:
            assert was_full.wait(20)
        received[rank] = [readers[rank].receive() for _ in messages]

    threads = [threading.Thread(target=read, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for message in messages:
        writer.send(message, lambda: was_full.set() or time.sleep(1e-3))
    for thread in threads:
        thread.join(20)  # a rank that missed a piece waits for ever
    assert received == [messages, messages]


def test_a_rank_that_reads_no_more_does_not_keep_the_writer(channels):
    writer, (reader, _) = channels
    for _ in range(SLOTS):
        writer.send(b"plan", full)
        assert reader.receive() == b"plan"
    with pytest.raises(Full):
        writer.send(b"plan", full)


def test_ranks_are_compared_in_what_all_have_noted(channels):
    writer, ranks = channels
    for number in range(40):  # more than are kept
        for kind in Digest:
            ranks[0].note(kind, number)
        writer.compare()
        for kind in Digest:
            ranks[1].note(kind, number)
        writer.compare()
    ranks[1].note(Digest.IDS, 1)
    writer.compare()
    ranks[0].note(Digest.IDS, 2)
    with pytest.raises(Unavailable, match=r"sampled ids in step 40.*'00000002', '00000001'"):
        writer.compare()
    ranks[0].note(Digest.PLAN, 7)
    ranks[1].note(Digest.PLAN, 8)
    with pytest.raises(Unavailable, match="one plan in step 40"):
        writer.compare()
