"""The arena's free list and the prefix tree, on their own: conservation, order, splits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from granikv.cache.arena import TokenArena
from granikv.cache.manager import Admission, CacheManager
from granikv.cache.prefix_tree import PrefixTree, common_length
from granikv.config import EngineConfig
from granikv.core import Request, RequestRow
from granikv.errors import ArenaExhausted
from granikv.sampling_params import SamplingParams

NAMESPACE = ("m", "", "", "")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["hot", "cold", "free"]), st.integers(1, 20)), max_size=60)
)
def test_arena_never_hands_out_a_slot_twice(steps):
    arena, held = TokenArena(101), []
    for kind, amount in steps:
        if kind == "free":
            if held:
                arena.free_slots(held.pop(amount % len(held)))
        elif kind == "hot":
            start = arena.allocate_extent(amount)
            if start is not None:
                held.append(np.arange(start, start + amount, dtype=np.int32))
        else:
            try:
                held.append(arena.allocate_slots(amount))
            except ArenaExhausted:
                assert arena.num_free < amount
        used = np.concatenate(held) if held else np.empty(0, np.int32)
        assert len(np.unique(used)) == len(used)
        assert arena.padding_slot not in used
        assert arena.num_free + len(used) == 100
        assert sum(arena.is_free(s) for s in range(100)) == arena.num_free
    for slots in held:
        arena.free_slots(slots)
    assert (arena._starts, arena._ends) == ([0], [100])


def test_arena_hot_low_cold_high_best_fit_and_double_free():
    arena = TokenArena(101)
    assert arena.allocate_extent(10) == 0
    assert arena.allocate_slots(3).tolist() == [97, 98, 99]
    middle = arena.allocate_extent(5)
    assert middle == 10 and arena.allocate_extent(7) == 15
    arena.free_extent(10, 5)
    assert arena.allocate_extent(4) == 10, "best fit takes the small hole"
    with pytest.raises(ValueError, match="expected in use"):
        arena.free_extent(14, 1)
    with pytest.raises(ArenaExhausted):
        arena.allocate_slots(1000)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12))
def test_tree_paths_spell_the_tokens_they_were_made_for(prompts):
    tree = PrefixTree()
    leaves = []
    for prompt in prompts:
        leaf = tree.insert_path(NAMESPACE, np.array(prompt, np.int32))
        leaf.users += 1
        leaves.append(leaf)
        for seen, node in zip(prompts, leaves, strict=False):
            path = tree.path(node)
            assert np.concatenate([n.tokens for n in path]).tolist() == seen
            assert [n.start for n in path] == np.cumsum([0, *map(len, path)])[:-1].tolist()
    for node in leaves:
        node.users = 0
    for node in list(tree.nodes()):
        node.users = 0
    while leaf := next((n for n in tree.nodes() if not n.children), None):
        tree.prune(leaf)
    assert list(tree.nodes()) == []


def test_common_length():
    a = np.array([1, 2, 3], np.int32)
    assert common_length(a, a) == 3
    assert common_length(a, a[:2]) == 2
    assert common_length(a, np.array([1, 9], np.int32)) == 1
    assert common_length(a, np.empty(0, np.int32)) == 0


def make_request(name, tokens, **settings):
    request = Request(name, np.array(tokens, np.int32), SamplingParams(), NAMESPACE)
    for key, value in settings.items():
        setattr(request, key, value)
    return request


def admit(cache, request, row):
    request.row = RequestRow(row)
    verdict = cache.try_admit(request, 0.0)
    if verdict is not Admission.ADMITTED:
        request.row = None
    return verdict


def test_c07_tokens_decide_a_hit_not_a_hash():
    """Two prompts of equal length, sum and first token share only what is really equal."""
    cache = CacheManager(EngineConfig(capacity_tokens=500, min_extent_tokens=4))
    first, second = make_request("p", [1, 2, 3, 4] * 8), make_request("q", [1, 4, 3, 2] * 8)
    cache.register(first, 0.0)
    assert admit(cache, first, 0) is Admission.ADMITTED
    cache.allocate(first, 0, 32)
    cache.publish(first, 32)
    cache.register(second, 0.0)
    assert admit(cache, second, 1) is Admission.ADMITTED
    assert second.num_computed == 1


def test_c46_a_duplicate_is_kept_while_its_request_reads_it():
    """Output tokens that another request also stored are freed only at the owner's end."""
    cache = CacheManager(EngineConfig(capacity_tokens=200, min_extent_tokens=4))
    pair = [make_request("a", range(8)), make_request("b", range(8))]
    for row, request in enumerate(pair):
        cache.register(request, 0.0)
        assert admit(cache, request, row) is Admission.ADMITTED
        cache.allocate(request, request.num_computed, 8 - request.num_computed)
        cache.publish(request, 8)
    for request in pair:
        request.output_token_ids = [50, 51, 52, 53]
        cache.allocate(request, 8, 3)
        cache.publish(request, 11)
    first, second = (list(r.tail_slots) for r in pair)
    assert not set(first) & set(second)
    cache.release(pair[0])
    assert not any(cache.arena.is_free(s) for s in second)
    cache.check_conservation([pair[1]])
    cache.release(pair[1])
    cache.check_conservation([])
    assert all(cache.arena.is_free(s) for s in second), "the tree has the first one's"
    third = make_request("c", [*range(8), 50, 51, 52, 53])
    cache.register(third, 0.0)
    assert admit(cache, third, 0) is Admission.ADMITTED
    assert third.num_computed == 11


def test_followers_wait_and_the_oldest_takes_over():
    cache = CacheManager(EngineConfig(capacity_tokens=200, min_extent_tokens=4))
    leader, follower = make_request("l", [*range(20), 90]), make_request("f", [*range(20), 91])
    for request in (leader, follower, make_request("third", [*range(20), 92])):
        cache.register(request, 0.0)
    assert admit(cache, leader, 0) is Admission.ADMITTED
    slots = cache.allocate(leader, 0, 12)
    assert slots.tolist() == list(range(12)), "a shared prefix is an extent at the low end"
    assert cache.usage([leader])["reserved"] == 1 + 20
    assert admit(cache, follower, 1) is Admission.WAIT_LEADER
    cache.publish(leader, 12)
    cache.release(leader)  # cancelled in mid-prefill: the written part stays
    assert admit(cache, follower, 1) is Admission.ADMITTED
    assert follower.num_computed == 12
    assert cache.allocate(follower, 12, 9)[:8].tolist() == list(range(12, 20))
    cache.publish(follower, 21)
    cache.check_conservation([follower])


def test_decode_slots_that_are_asked_for_again_are_written_once():
    """One of two last prompt tokens finds no slot; the other's is kept, and listed by the retry."""
    cache = CacheManager(EngineConfig(capacity_tokens=40, min_extent_tokens=100))
    first, second = make_request("first", range(6)), make_request("second", range(10, 16))
    for row, request in enumerate((first, second)):
        cache.register(request, 0.0)
        admit(cache, request, row)
        cache.allocate(request, 0, 5)
        cache.publish(request, 5)
    cache.take_slot_writes()
    cache.arena.allocate_slots(cache.arena.num_free - 1)  # others take all but one
    positions = np.array([5, 5], np.int32)
    with pytest.raises(ArenaExhausted):
        cache.allocate_decodes([first, second], positions)
    assert cache.take_slot_writes() == []
    kept = [node.slots[5] for node in cache.path(first)]
    cache.release(second, keep=False)
    assert cache.allocate_decodes([first], positions[:1]).tolist() == kept
    assert [(row, at, slots.tolist()) for row, at, slots in cache.take_slot_writes()] == [
        (0, 5, kept)
    ]
