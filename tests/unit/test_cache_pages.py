"""The uniform layout: aligned pages of 16 tokens, whole-page matches, one copy, never HOT."""

from __future__ import annotations

import numpy as np
import pytest

from granikv.cache.manager import Admission, CacheManager
from granikv.config import EngineConfig
from granikv.core import Request, RequestRow
from granikv.errors import ArenaExhausted, InvalidArgument
from granikv.sampling_params import SamplingParams

PAGE = 16


def make_cache(capacity=401, **settings):
    return CacheManager(
        EngineConfig(
            capacity_tokens=capacity, prefix_layout="uniform", min_extent_tokens=1, **settings
        )
    )


def start(cache, name, tokens, row, written=None):
    """Register, admit and write a prompt; returns the request and its slots by position."""
    request = Request(name, np.array(tokens, np.int32), SamplingParams())
    cache.register(request, 0.0)
    request.row = RequestRow(row)
    assert cache.try_admit(request, 0.0) is Admission.ADMITTED
    first = request.num_computed
    count = (request.prompt_len if written is None else written) - first
    slots = cache.allocate(request, first, count)
    request.num_computed += count
    cache.publish(request, request.num_computed)
    return request, slots


@pytest.mark.parametrize(
    "common,reused", [(0, 0), (15, 0), (16, 16), (17, 16), (31, 16), (32, 32), (40, 32)]
)
def test_matches_are_rounded_down_to_whole_pages(common, reused):
    cache = make_cache()
    first, _ = start(cache, "a", [1] * 40 + [2] * 5, 0)
    second, _ = start(cache, "b", [1] * common + [3] * 20, 1)
    assert second.num_computed - (common + 20 - reused) == reused
    cache.check_conservation([first, second])
    for request in (first, second):
        cache.release(request)
    cache.check_conservation([])


@pytest.mark.parametrize("length,reused", [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_a_whole_cached_prompt_recomputes_its_last_page(length, reused):
    cache = make_cache()
    cache.release(start(cache, "a", range(length), 0)[0])
    request = Request("b", np.arange(length, dtype=np.int32), SamplingParams())
    cache.register(request, 0.0)
    request.row = RequestRow(0)
    assert cache.try_admit(request, 0.0) is Admission.ADMITTED
    assert request.num_computed == reused
    slots = cache.allocate(request, reused, length - reused)
    if length % PAGE == 0:
        assert set(slots.tolist()) == {cache.arena.padding_slot}, "one stored copy"
    else:
        assert cache.arena.padding_slot not in slots


def test_pages_are_aligned_reserved_whole_and_returned_whole():
    cache = make_cache(capacity=405)  # 404 usable slots: 25 pages, 4 slots behind the last
    request, slots = start(cache, "a", range(40), 0)
    assert slots[0] % PAGE == slots[16] % PAGE == slots[32] % PAGE == 0
    for page in (slots[:16], slots[16:32], slots[32:]):
        assert np.diff(page).tolist() == [1] * (len(page) - 1)
    usage = cache.usage([request])
    assert (usage["cold"], usage["free"]) == (40, 400 - 48)
    assert usage["reserved"] == 1 + 4 + 8, "padding, behind the last page, rest of the last page"
    assert cache.allocate(request, 40, 1)[0] == slots[-1] + 1, "within the page: nothing is taken"
    assert cache.usage([request])["free"] == 400 - 48
    cache.check_conservation([request])
    cache.release(request)
    assert cache.usage([])["cold"] == 32, "only full pages stay"
    assert cache.arena.num_free % PAGE == 0
    cache.evict(1)
    assert cache.arena.num_free == 400 - 16, "a page at a time"
    cache.check_conservation([])


def test_diverging_requests_share_no_page():
    cache = make_cache()
    a, _ = start(cache, "a", [1] * 24 + [2] * 24, 0)
    b, _ = start(cache, "b", [1] * 24 + [3] * 24, 1)
    nodes_a, nodes_b = cache.path(a), cache.path(b)
    assert nodes_a[0] is nodes_b[0] and len(nodes_a[0]) == 16
    own = [
        {int(s) // PAGE for node in nodes[1:] for s in node.slots[: node.allocated]}
        | {s // PAGE for s in request.tail_slots}
        for request, nodes in ((a, nodes_a), (b, nodes_b))
    ]
    shared = {int(s) // PAGE for s in nodes_a[0].slots}
    assert len(shared) == 1 and not (own[0] & own[1] or shared & (own[0] | own[1]))
    assert not any(node.is_hot for node in cache.tree.nodes())


def test_a_position_asked_for_twice_keeps_its_slot():
    """A step that is scheduled again after the pipeline was drained."""
    for layout in ("uniform", "asymmetric"):
        cache = CacheManager(EngineConfig(capacity_tokens=100, prefix_layout=layout))
        request, _ = start(cache, "a", range(20), 0)
        first = cache.allocate(request, 20, 1)
        free = cache.arena.num_free
        assert cache.allocate(request, 20, 1).tolist() == first.tolist()
        assert cache.arena.num_free == free
        assert cache.allocate(request, 21, 1)[0] != first[0]


def test_a_partly_written_page_is_not_published():
    cache = make_cache()
    leader, _ = start(cache, "a", range(64), 0, written=40)
    cache.release(leader)  # cancelled in mid-prefill
    request, _ = start(cache, "b", range(64), 0)
    assert cache.usage([request])["cold"] == 64
    cache.check_conservation([request])
    late = Request("c", np.arange(64, dtype=np.int32), SamplingParams(), num_preemptions=0)
    cache.register(late, 0.0)
    assert sum(node.published for node in cache.path(late)) == 64


def test_a_request_that_does_not_fit_evicts_nothing():
    cache = make_cache(capacity=161)  # ten pages
    cache.release(start(cache, "old", range(48), 0)[0])
    running, _ = start(cache, "r", range(100, 164), 1)
    request = Request("big", np.arange(200, 320, dtype=np.int32), SamplingParams())
    cache.register(request, 0.0)
    request.row = RequestRow(2)
    assert cache.try_admit(request, 0.0) is Admission.NO_SPACE
    with pytest.raises(ArenaExhausted):
        cache.allocate(running, 64, 120)
    assert cache.counters["evicted_tokens"] == 0
    cache.check_conservation([running])


def test_capacity_of_less_than_a_page_is_refused():
    with pytest.raises(InvalidArgument, match="at least 17"):
        make_cache(capacity=16)
    assert make_cache(capacity=40).max_request_tokens == 31
