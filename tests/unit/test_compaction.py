"""Compaction: what lies in an extent's window moves, idle or in use, and nothing of it is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers_shadow import Load

from granikv import plan_log
from granikv.cache.arena import TokenArena
from granikv.cache.manager import Admission, CacheManager
from granikv.cache.spans_in_use import spans_in_use
from granikv.config import EngineConfig
from granikv.core import Move, Request, RequestRow
from granikv.sampling_params import SamplingParams

PREFIX = list(range(1000, 1060))
LONG = list(range(2000, 2099))


def make_cache(**settings):
    defaults = {"capacity_tokens": 201, "min_extent_tokens": 16, "recency_window_s": 0.0}
    return CacheManager(EngineConfig(**(defaults | settings)))


def new_request(cache, name, tokens, now=0.0, **fields):
    tokens = np.array(tokens, np.int32)
    request = Request(name, tokens, SamplingParams(), ("m", "", "", ""), **fields)
    cache.register(request, now)
    return request


def admit(cache, request, now=0.0, row=0):
    request.row = RequestRow(row)
    assert cache.try_admit(request, now, reserve=0) is Admission.ADMITTED
    return request


def compute(cache, request):
    """Its whole prompt, in one step that ends before the next call."""
    first = request.num_computed
    cache.allocate(request, first, request.prompt_len - first)
    request.num_computed = request.prompt_len
    cache.publish(request, request.prompt_len)
    return request


def end(cache, request, now=0.0):
    request.last_token_time = now
    cache.release(request)
    request.row = None


def step(cache, step_id, *, completed=True):
    """Moves of a step that is launched, and perhaps ends."""
    moves = cache.plan_moves()
    cache.take_slot_writes()
    cache.step_launched(step_id)
    if completed:
        cache.step_completed(step_id)
    return moves


def checkerboard(cache, count, length=20):
    """Idle nodes of `length` tokens that fill the arena, every other one evicted again."""
    requests = []
    for i in range(count):
        tokens = [10_000 + 100 * i + k for k in range(length)]
        requests.append(compute(cache, admit(cache, new_request(cache, f"old{i}", tokens, i), i)))
        end(cache, requests[-1], i)
    for request in requests[::2]:
        for node in list(cache.tree.nodes()):
            if node.tokens[0] == request.prompt_token_ids[0]:
                cache.storage.evict_from(node, 0)
    cache.storage.counters["evicted_tokens"] = 0
    return requests[1::2]


def stored_tokens(cache):
    return {int(t) for node in cache.tree.nodes() for t in node.tokens[: node.published]}


def slots_of(moves):
    sources = [s for m in moves for s in m.src_slots.tolist()]
    targets = [s for m in moves for s in range(m.dst_start, m.dst_start + m.length)]
    return sources, targets


def test_taking_free_slots_leaves_the_rest_free():
    arena = TokenArena(101)
    arena.allocate_slots(10)  # 90 to 99
    arena.allocate_extent(20)
    assert arena.take_free(10, 40) == 20 and arena.num_free == 50
    assert arena.take_free(50, 60) == 10 and arena.free_ranges() == [(40, 50), (60, 90)]
    assert arena.take_free(20, 40) == 0
    arena.free_slots(np.arange(50, 60))
    assert arena.free_ranges() == [(40, 90)]


def test_idle_kv_moves_out_of_an_unwritten_extents_window():
    cache = make_cache()
    checkerboard(cache, 10)
    before = stored_tokens(cache)
    assert max(b - a for a, b in cache.arena.free_ranges()) == 20
    pair = [new_request(cache, f"r{i}", [*LONG, i], 50.0) for i in range(2)]
    admit(cache, pair[0], 50.0)
    window = cache.hot_path(pair[0])[0].extent
    compute(cache, pair[0])
    moves = step(cache, 0)
    sources, targets = slots_of(moves)
    assert len(sources) == 40 and not set(sources) & set(targets)
    assert all(window <= s < window + 99 for s in sources)
    assert not any(window <= s < window + 99 for s in targets)
    assert before <= stored_tokens(cache) and cache.counters["evicted_tokens"] == 0
    assert cache.counters["compacted_tokens"] == cache.counters["moved_tokens"] == 40
    assert {m.reason for m in moves} == {"compaction"}
    cache.check_conservation([pair[0]])


@pytest.mark.parametrize("budget,evicted", [(0, 40), (16, 40), (20, 20), (39, 20), (40, 0)])
def test_what_exceeds_the_steps_budget_is_evicted_oldest_first(budget, evicted):
    cache = make_cache(max_move_tokens=budget)
    checkerboard(cache, 10)
    pair = [new_request(cache, f"r{i}", [*LONG, i], 50.0) for i in range(2)]
    admit(cache, pair[0], 50.0)
    assert cache.counters["extents"] == 1
    assert sum(m.length for m in step(cache, 0)) == 40 - evicted
    assert cache.counters["evicted_tokens"] == evicted
    if evicted == 20:  # of the two in the window (older ones first), the older one is gone
        kept = sorted({t // 100 - 100 for t in stored_tokens(cache) if t >= 10_000})
        assert kept == [3, 5, 7, 9]
    cache.check_conservation([pair[0]])


def shared_and_cold(cache):
    """Two running requests with the same stored prefix, which no free run can hold."""
    first = compute(cache, admit(cache, new_request(cache, "a", [*PREFIX, 1])))
    checkerboard(cache, 6)
    second = compute(cache, admit(cache, new_request(cache, "b", [*PREFIX, 2]), row=1))
    return first, second


def test_a_promotion_waits_until_its_window_is_empty():
    cache = make_cache()
    pair = shared_and_cold(cache)
    kept = stored_tokens(cache)
    moves = step(cache, 0, completed=False)
    assert {m.reason for m in moves} == {"compaction"} and cache.storage.window is not None
    cache.check_conservation(pair)
    assert step(cache, 1, completed=False) == [], "the step that clears the window still runs"
    cache.step_completed(0)
    (promotion,) = step(cache, 2)
    assert promotion.reason == "promotion" and promotion.length == 60
    assert set(slots_of(moves)[0]) <= set(slots_of([promotion])[1]), "into the emptied slots"
    assert cache.storage.window is None and cache.usage(pair)["hot"] == 60
    assert kept == stored_tokens(cache) and cache.counters["evicted_tokens"] == 0
    cache.check_conservation(pair)


def test_a_kept_window_returns_when_its_users_end_or_a_step_does_not_use_it():
    cache = make_cache()
    pair = shared_and_cold(cache)
    step(cache, 0, completed=False)
    for request in pair:
        end(cache, request)
    assert cache.storage.window is None
    cache.step_completed(0)
    assert cache.usage([])["retiring"] == 0
    cache.check_conservation([])

    cache = make_cache()
    shared_and_cold(cache)
    step(cache, 0)
    cache.step_launched(1)
    assert cache.storage.window is not None
    cache.step_completed(1)
    assert cache.storage.window is None and cache.usage([])["retiring"] == 0


def test_slots_of_a_kept_window_serve_before_anybody_is_refused():
    cache = make_cache()
    shared_and_cold(cache)
    step(cache, 0)
    room = cache.arena.num_free + cache.storage.num_evictable() + cache.storage.window.length
    late = new_request(cache, "late", range(5000, 5000 + room - 1))
    admit(cache, late, row=2)
    assert cache.storage.window is None and cache.counters["evicted_tokens"] > 0


@pytest.mark.parametrize("free_end,stays_hot", [(130, 30), (120, 15)])
def test_an_idle_extent_moves_whole_or_is_cold_from_the_window_on(free_end, stays_hot):
    """Slots: 30 of an idle extent, 45 free, others taken, a free run from 100 on."""
    cache = make_cache()
    first = compute(cache, admit(cache, new_request(cache, "h", PREFIX[:30], shared_prefix_len=30)))
    end(cache, first)
    (extent,) = cache.tree.nodes()
    assert (extent.extent, len(extent)) == (0, 30)
    assert cache.arena.take_free(75, 100) + cache.arena.take_free(free_end, 200) > 0
    wanted = admit(cache, new_request(cache, "w", range(60), shared_prefix_len=60))
    assert cache.hot_path(wanted)[0].extent == 15
    sources, targets = slots_of(step(cache, 0, completed=False))
    assert not any(cache.arena.is_free(s) for s in range(15)), "still read by the move"
    cache.step_completed(0)
    assert cache.arena.is_free(0) == (stays_hot == 30)
    if stays_hot == 30:
        assert sources == list(range(30)) and targets == list(range(100, 130))
    else:
        assert sources == list(range(15, 30)) and set(targets) <= set(range(100, 120))
    assert cache.counters["evicted_tokens"] == 0 and set(PREFIX[:30]) <= stored_tokens(cache)
    again = admit(cache, new_request(cache, "again", [*PREFIX[:30], 1]), row=1)
    assert again.num_computed == 30
    assert sum(len(node) for node in cache.hot_path(again)) == stays_hot


def test_an_extent_does_not_take_the_slots_that_others_move_to():
    """As above with a free run of 30 and, in the window, 10 idle slots behind the extent's."""
    cache = make_cache()
    first = compute(cache, admit(cache, new_request(cache, "h", PREFIX[:30], shared_prefix_len=30)))
    end(cache, first)
    assert cache.arena.take_free(40, 200) == 160
    end(cache, compute(cache, admit(cache, new_request(cache, "c", range(500, 510)))))
    cache.arena.free_extent(40, 35)
    cache.arena.free_extent(100, 30)
    wanted = admit(cache, new_request(cache, "w", range(60), shared_prefix_len=60))
    assert cache.hot_path(wanted)[0].extent == 15
    sources, _ = slots_of(step(cache, 0))
    assert sorted(sources) == list(range(15, 40))
    assert {*PREFIX[:30], *range(500, 510)} <= stored_tokens(cache)


def test_moved_kv_keeps_its_place_in_the_order_of_eviction():
    cache = make_cache()
    checkerboard(cache, 10)
    cache.evict(1)  # of old1, the oldest; victims are found once for several calls
    writer = new_request(cache, "w", [*LONG, 1], 50.0, shared_prefix_len=99)
    admit(cache, writer, 50.0)
    assert step(cache, 0, completed=False)
    cache.evict(1)  # what moves cannot leave now
    cache.step_completed(0)
    order = []
    while len(order) < 5:
        known = {t // 100 - 100 for t in stored_tokens(cache) if t >= 10_000}
        if not known:
            break
        cache.evict(1)
        left = {t // 100 - 100 for t in stored_tokens(cache) if t >= 10_000}
        order += sorted(known - left)
    assert order == sorted(order) and len(order) >= 4, order


def test_a_failed_step_forgets_idle_kv_that_it_was_to_move():
    cache = make_cache()
    kept = checkerboard(cache, 10)
    pair = [new_request(cache, f"r{i}", [*LONG, i], 50.0) for i in range(2)]
    admit(cache, pair[0], 50.0)
    sources, _ = slots_of(step(cache, 0, completed=False))
    late = new_request(cache, "late", [*kept[1].prompt_token_ids[:9], 1])  # splits a moved node
    cache.step_completed(0)
    for request in pair:
        cache.release(request)
    cache.forget_moves(0)
    assert len(stored_tokens(cache)) == 5 * 20 - len(sources)
    assert sum(node.published for node in cache.path(late)) in (0, 9)
    end(cache, late)
    cache.check_conservation([])


def generate(cache, request, count):
    """Published output tokens behind the prompt."""
    start = request.prompt_len
    cache.allocate(request, start, count)
    request.output_token_ids = list(range(7000, 7000 + count))
    request.num_computed = start + count
    cache.publish(request, start + count)


@pytest.mark.parametrize("fails", [False, True])
def test_a_tail_in_use_moves_with_its_slot_list_and_is_forgotten_with_the_step(fails):
    """Free: 50 slots, ten that are taken, 37; the prefix of 60 needs the tail's place."""
    cache = make_cache()
    pair = [compute(cache, admit(cache, new_request(cache, "a", [*PREFIX, 1])))]
    pair.append(compute(cache, admit(cache, new_request(cache, "b", [*PREFIX, 2]), row=1)))
    tail = compute(cache, admit(cache, new_request(cache, "t", [3]), row=2))
    generate(cache, tail, 40)
    cache.take_slot_writes()
    before = list(tail.tail_slots)
    assert cache.arena.take_free(50, 60) == 10
    sources, targets = slots_of(cache.plan_moves())
    assert set(sources) & set(before) and not set(targets) & set(before)
    writes = cache.take_slot_writes()
    assert {int(s) for _, _, slots in writes for s in slots} == set(targets)
    for row, positions, slots in writes:
        if row == tail.row and positions[0]:  # behind the prompt of one token
            assert [tail.tail_slots[p - 1] for p in positions] == slots.tolist()
    cache.step_launched(0)
    spans = cache._spans_in_use()
    assert not any(set(span.slots.tolist()) & set(targets) for span in spans), "not twice"
    end(cache, tail)  # cancelled while it is being moved
    cache.step_completed(0)
    for request in pair:
        end(cache, request)
    if fails:
        cache.forget_moves(0)
    assert (7000 in stored_tokens(cache)) != fails
    assert cache.usage([])["retiring"] == 0


def test_spans_in_use_are_of_settled_kv_and_name_who_must_be_told():
    cache = make_cache()
    pair = [compute(cache, admit(cache, new_request(cache, "a", [*PREFIX, 1])))]
    pair.append(compute(cache, admit(cache, new_request(cache, "b", [*PREFIX, 2]), row=1)))
    (shared,) = (span for span in cache._spans_in_use() if len(span.slots) == 60)
    assert shared.readers == [], "the next step writes the slots of both anyway"
    cache.take_slot_writes()
    (shared,) = (span for span in cache._spans_in_use() if len(span.slots) == 60)
    assert shared.readers == pair and shared.position == 0
    assert shared.node is not None
    for filled_step, count in ((5, 0), (4, 1)):
        shared.node.filled_step = filled_step
        spans = spans_in_use([(r, cache.path(r)) for r in pair], {}, completed_step=4)
        assert sum(len(span.slots) == 60 for span in spans) == count


def test_kv_that_is_being_moved_is_promoted_after_that():
    cache = make_cache(capacity_tokens=241)
    checkerboard(cache, 10)
    writer = new_request(cache, "w", [*LONG, 1], 50.0, shared_prefix_len=99)
    admit(cache, writer, 50.0)
    targets = slots_of(step(cache, 0, completed=False))[1]
    moved = [n for n in cache.tree.nodes() if set(n.stored_slots()) & set(targets)]
    assert moved and cache.arena.num_free >= 20
    for i in range(2):
        new_request(cache, f"u{i}", [*moved[0].tokens, i], 60.0)
    assert step(cache, 1, completed=False) == []
    cache.step_completed(1)
    (promotion,) = step(cache, 2)
    assert promotion.reason == "promotion" and promotion.length == 20


def test_the_plan_log_names_what_moves_and_why():
    load = Load(
        {"capacity_tokens": 200, "max_requests": 2}, layout="asymmetric", async_depth=0,
        is_late=False, failing=frozenset(),
    )  # fmt: skip
    plans, launch = [], load.executor.launch
    load.executor.launch = lambda plan: plans.append(plan) or launch(plan)
    load.run([([5, 6, 7], 1, "", "", 0, 0), 2])
    slots = np.arange(3, dtype=np.int32)
    plans[0].moves = [Move(slots, 10, "compaction"), Move(slots, 20, "compaction"), Move(slots, 30)]
    assert plan_log.lines(plans[0])[-2:] == [
        "step 0: move: 6 tokens to 2 places (compaction)",
        "step 0: move: 3 tokens to 1 places (promotion)",
    ]
