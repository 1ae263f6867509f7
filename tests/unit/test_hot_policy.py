"""What becomes HOT: shared at one moment, used a moment ago, declared by length or by prefix_id."""

from __future__ import annotations

import numpy as np
import pytest

from granikv.cache.manager import Admission, CacheManager
from granikv.cache.policy import PrefixIds
from granikv.config import EngineConfig
from granikv.core import Request, RequestRow
from granikv.sampling_params import SamplingParams

PREFIX = list(range(100, 140))


def make_cache(**settings):
    defaults = {"capacity_tokens": 2000, "min_extent_tokens": 16, "recency_window_s": 10.0}
    return CacheManager(EngineConfig(**(defaults | settings)))


def start(cache, name, tokens, now=0.0, row=0, salt="", **fields):
    """A request that has computed its prompt."""
    request = Request(
        name, np.array(tokens, np.int32), SamplingParams(), ("m", "", salt, ""), **fields
    )
    cache.register(request, now)
    request.row = RequestRow(row)
    assert cache.try_admit(request, now) is Admission.ADMITTED
    first = request.num_computed
    cache.allocate(request, first, request.prompt_len - first)
    request.num_computed = request.prompt_len
    cache.publish(request, request.prompt_len)
    return request


def end(cache, request, now):
    request.last_token_time = now
    cache.release(request)
    request.row = None


def hot_tokens(cache, request):
    return sum(len(node) for node in cache.hot_path(request))


@pytest.mark.parametrize("gap_s,expected", [(9.0, 40), (11.0, 0)])
def test_a_prefix_used_within_the_window_is_promoted_for_a_single_newcomer(gap_s, expected):
    cache = make_cache()
    end(cache, start(cache, "a", [*PREFIX, 1, 2]), now=50.0)  # the window starts at its end
    request = start(cache, "b", [*PREFIX, 3, 4], now=50.0 + gap_s)
    moves = cache.plan_moves()
    assert sum(move.length for move in moves) == expected == hot_tokens(cache, request)
    cache.check_conservation([request])


def test_a_preempted_request_is_not_another_one():
    cache = make_cache()
    request = start(cache, "a", [*PREFIX, 1, 2])
    end(cache, request, now=1.0)
    request.num_preemptions = 1
    cache.register(request, 1.0)
    assert cache.plan_moves() == []


def test_a_declared_length_is_hot_for_one_request_stored_or_not():
    cache = make_cache()
    request = start(cache, "a", [*PREFIX, *range(30)], shared_prefix_len=40)
    assert hot_tokens(cache, request) == 40
    cache = make_cache()
    first = start(cache, "a", [*PREFIX, *range(30)])
    end(cache, first, now=0.0)
    request = start(cache, "b", [*PREFIX, 7], now=1e6, shared_prefix_len=40)
    assert sum(move.length for move in cache.plan_moves()) == 40 == hot_tokens(cache, request)


def test_prefix_id_declares_what_its_requests_have_in_common():
    """Apart by more than the window and never two at once: only the id can tell."""
    cache = make_cache()
    first = start(cache, "a", [*PREFIX, *range(30)], now=0.0, prefix_id="p")
    assert first.shared_prefix_len == 0 and hot_tokens(cache, first) == 0
    end(cache, first, now=0.0)
    second = start(cache, "b", [*PREFIX, *range(50, 80)], now=1e3, prefix_id="p")
    cache.plan_moves()
    assert cache.evict(2000) == 30, "the copy of the other 40 has not run yet"
    cache.step_launched(0)
    cache.step_completed(0)
    assert second.shared_prefix_len == 40 == hot_tokens(cache, second)
    end(cache, second, now=1e3)
    cache.evict(2000)
    third = start(cache, "c", [*PREFIX, 9], now=2e3, prefix_id="p")
    assert third.num_cached_tokens == 0 and hot_tokens(cache, third) == 40, "at once, alone"
    end(cache, third, now=2e3)
    cache.evict(2000)
    assert hot_tokens(cache, start(cache, "d", [*PREFIX, 9], now=3e3)) == 0, "without the id"


def test_prefix_id_never_crosses_namespaces():
    cache = make_cache()
    for i, salt in enumerate(["x", "y"]):
        request = start(cache, f"r{i}", [*PREFIX, i], now=1e3 * i, salt=salt, prefix_id="p")
        assert request.shared_prefix_len == 0
        end(cache, request, now=1e3 * i)
    cache.evict(2000)
    for i, salt in enumerate(["x", "y"]):
        request = start(cache, f"s{i}", [*PREFIX, 5], now=1e4 + i, salt=salt, prefix_id="p")
        assert hot_tokens(cache, request) == 40
        end(cache, request, now=1e4 + i)


def test_prefix_ids_are_bounded_and_an_id_can_change_its_meaning():
    ids = PrefixIds(min_tokens=4, capacity=2)

    def declare(name, tokens, **fields):
        return ids.declared_len(
            Request("r", np.array(tokens, np.int32), SamplingParams(), prefix_id=name, **fields)
        )

    assert declare("a", [1, 2, 3, 4, 5, 6]) == 0
    assert declare("a", [1, 2, 3, 4, 5, 9]) == 5
    assert declare("a", [1, 2, 3, 4, 8]) == 4, "narrowed"
    assert declare("a", [1, 2, 3, 4, 5, 9]) == 4
    assert declare("a", [1, 7, 7, 7, 7]) == 0, "a new meaning: only the first token is common"
    assert declare("a", [1, 7, 7, 7, 6]) == 4
    assert declare("b", [1, 2, 3, 4, 5], shared_prefix_len=5) == 5
    assert declare("b", [1, 2, 3, 4, 5, 6]) == 5, "the first one taught the length"
    assert declare("c", [1]) == 0 and len(ids) == 2
    assert declare("a", [1, 7, 7, 7, 6]) == 0, "forgotten: least recently used"


def test_a_failed_promotion_is_forgotten_also_behind_a_split():
    cache = make_cache()
    pair = [start(cache, "a", [*PREFIX, 1]), start(cache, "b", [*PREFIX, 2], row=1)]
    moves = cache.plan_moves()
    assert moves
    cache.step_launched(0)
    late = Request("c", np.array([*PREFIX[:20], 5], np.int32), SamplingParams(), ("m", "", "", ""))
    cache.register(late, 0.0)  # splits the node that the step in flight was to fill
    cache.step_completed(0)
    for request in pair:
        cache.release(request)
    cache.forget_moves(0)
    assert sum(node.published for node in cache.path(late)) == 0
    cache.check_conservation([])


def test_a_node_longer_than_a_steps_budget_is_promoted_in_parts():
    cache = make_cache(max_move_tokens=32, recency_window_s=1e9)
    long = list(range(200, 300))
    end(cache, start(cache, "a", [*long, 1]), now=0.0)
    request = start(cache, "b", [*long, 2], now=1.0)
    moved = []
    for step in range(6):
        moved.append(sum(move.length for move in cache.plan_moves()))
        cache.step_launched(step)
        cache.step_completed(step)
        cache.check_conservation([request])
    assert moved == [32, 32, 32, 0, 0, 0], "the rest is shorter than an extent"
    assert hot_tokens(cache, request) == 96
