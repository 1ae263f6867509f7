"""The attention grid without a GPU: its points, what is planned of each, and runs in parts."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from granikv.attention.layout_choice import Cuts
from granikv.attention.variants import LAYOUTS
from granikv.bench import grid
from granikv.bench.attention_step import BenchStep, CaseSpans
from granikv.bench.grid import BASELINES, CANDIDATES, measure_point, read_results, run_grid
from granikv.bench.grid_effort import effort, estimate_s
from granikv.bench.grid_plan import candidates, choose, chosen_candidate, cost_model, is_legal
from granikv.bench.grid_points import (
    BATCH,
    MAX_POINT_BYTES,
    POINTS_FILE,
    PREFIX,
    SUFFIX,
    GridPoint,
    format_points,
    load_points,
    make_points,
    slice_points,
)
from granikv.core import SpanKind
from granikv.errors import InvalidArgument, Unsupported
from tests.grid_double import PROFILE, RUN, MadeUpGpu

POINTS = load_points()
SHARED = GridPoint(0, "corner", 4, 128, ((16384, 16), *((4096, 16),) * 5), 512)
UNEVEN = GridPoint(1, "hypercube", 4, 128, ((16421, 6), (131, 1)), (17, 499, 30, 31, 40, 50, 60))


def test_the_file_is_what_the_script_makes():
    made = make_points()
    assert POINTS_FILE.read_text() == format_points(made) and made == POINTS
    other = [replace(made[0], suffix_len=17), *made[1:]]
    assert format_points(other) != POINTS_FILE.read_text()


def test_the_points_cover_the_ranges():
    assert [point.index for point in POINTS] == list(range(240))
    shapes = {(point.gqa_group, point.head_dim) for point in POINTS}
    assert shapes == {(gqa, dim) for gqa in (1, 4, 8) for dim in (64, 128)}
    changes = sum(a.shape != b.shape for a, b in zip(POINTS, POINTS[1:], strict=False))
    assert changes == 5  # a slice needs the kernels of few shapes
    for point in POINTS:
        lens, sizes = np.array(point.groups).T
        assert PREFIX[0] <= lens.min() and lens.max() <= PREFIX[1] and sizes.min() >= 1
        assert 1 <= point.case.batch <= BATCH[1] and len(lens) <= 64
        assert (
            SUFFIX[0] <= point.case.suffix_lens.min() <= point.case.suffix_lens.max() <= SUFFIX[1]
        )
        assert point.kv_bytes <= MAX_POINT_BYTES
    ends = {(p.groups[0][0], p.case.batch, len(p.groups), p.suffix_len) for p in POINTS[120:160]}
    assert {
        (n, b, g, s) for n in PREFIX for b, g in ((1, 1), (512, 1), (512, 64)) for s in SUFFIX
    } < ends
    ragged = [p for p in POINTS if p.kind == "hypercube" and p.case.batch > 8]
    # a hypercube of equal lengths would be a trap for no one
    assert all(len(set(p.suffix_len)) > 1 for p in ragged if max(p.suffix_len) > 40)
    assert np.mean([n % 64 != 0 for p in ragged for n, _ in p.groups]) > 0.9


@pytest.mark.parametrize("text", ["5", "a:b", "240:", "3:3", "1:2:3:4"])
def test_a_bad_slice_is_named(text):
    if text == "5":
        with pytest.raises(InvalidArgument, match="--points"):
            slice_points(POINTS, text)
        return
    with pytest.raises((InvalidArgument, TypeError), match="--points"):
        slice_points(POINTS, text)


def test_slices_are_pythons():
    assert [p.index for p in slice_points(POINTS, "238:")] == [238, 239]
    assert slice_points(POINTS, None) is POINTS and len(slice_points(POINTS, ":7")) == 7


def test_ragged_suffixes_lie_where_the_plan_says():
    step = BenchStep(UNEVEN.case, UNEVEN.shape, UNEVEN.case.unique_tokens + 64)
    lens = UNEVEN.case.suffix_lens
    assert (step.positions + 1 == UNEVEN.case.prefix_of_request + lens).all()
    own = [
        step.request_slots[r, p + 1 - n : p + 1]
        for r, (p, n) in enumerate(zip(step.positions, lens, strict=True))
    ]
    slots = np.concatenate(own)
    assert len(set(slots.tolist())) == lens.sum() and slots.min() >= 16421 + 131  # none of a prefix
    assert (step.plan(step.split(132, 16384)).slot_mapping == [s[-1] for s in own]).all()
    with pytest.raises(ValueError, match="broadcast"):
        _ = replace(UNEVEN.case, suffix_len=(1, 2)).suffix_lens


def test_groups_that_do_not_share_read_their_prefix_in_place():
    spans = CaseSpans(UNEVEN.case, UNEVEN.shape)
    groups, cold = spans.spans(np.array([True, False]))
    assert groups.kv_len.tolist() == [16421] and groups.rows.tolist() == list(range(6))
    runs = cold[cold[:, 1] == SpanKind.RUN]
    assert runs.tolist() == [[6, SpanKind.RUN, 16421, 131, 0]]  # behind the first one's extent
    whole, unshared = spans.spans()
    assert len(whole.kv_len) == 2 and (unshared[:, 1] == SpanKind.SLOTS).all()
    # the tokens that each row sees are the same
    seen = np.bincount(cold[:, 0], cold[:, 3], 7)
    seen[groups.rows] += 16421
    assert (seen == spans.positions + 1).all()


def test_given_cuts_are_kept():
    spans = CaseSpans(SHARED.case, SHARED.shape)
    split = spans.split(132, 16384, LAYOUTS["groups"], cuts=Cuts(hot=3, cold=2))
    first = split.hot_items[split.hot_items[:, 0] == 0]
    assert len(first) == 3 and first[:, 3].sum() == 16384
    assert (np.bincount(split.cold_items[:, 0]) == 2).all()
    usual = spans.split(132, 16384, LAYOUTS["groups"])
    assert len(usual.hot_items) != len(split.hot_items)
    # never below the layout's shortest item, however many pieces are asked for
    many = spans.split(132, 16384, LAYOUTS["even"], cuts=Cuts(hot=500))
    assert many.hot_items[:, 3].min() >= LAYOUTS["even"].min_hot_tokens // 2


def test_candidates_are_legal_and_different():
    spans, cost = CaseSpans(SHARED.case, SHARED.shape), cost_model(PROFILE, SHARED)
    choice = choose(spans, cost, 132)
    chosen = chosen_candidate(spans, choice, 132)
    found = list(candidates(spans, chosen, choice.mask, 132))
    assert found[0] is chosen and choice.layout == "mid" and choice.shared == "all"
    keys = {(c.layout, c.split.hot_items.tobytes(), c.split.cold_items.tobytes()) for c in found}
    assert len(keys) == len(found) > 60
    assert {c.layout for c in found} == set(LAYOUTS)
    assert all((c.layout == "flat") == (c.shared == "none") for c in found)
    # a prefix below the Gluon kernel's tile: its layouts would be refused on the GPU
    short = GridPoint(0, "corner", 4, 128, ((100, 64),), 16)
    split = CaseSpans(short.case, short.shape).split(132, 16384, LAYOUTS["dense"])
    assert not is_legal(split, LAYOUTS["dense"]) and is_legal(split, LAYOUTS["mid"])


def test_a_group_of_one_is_read_flat_and_the_prediction_counts_it():
    spans, cost = CaseSpans(UNEVEN.case, UNEVEN.shape), cost_model(PROFILE, UNEVEN)
    choice = choose(spans, cost, 132)
    assert choice.shared == "10" and choice.mask.tolist() == [True, False]
    slower = cost_model(PROFILE | {"read_gb_per_s": 400.0, "step_us": 7.0}, UNEVEN)
    late = choose(spans, slower, 132).predicted_us
    assert 7 + choice.predicted_us < late and choice.predicted_us > cost.read_us(16421)


def test_a_line_has_the_choice_and_what_was_asked():
    gpu = MadeUpGpu()
    line = measure_point(SHARED, gpu(SHARED), PROFILE, {BASELINES, CANDIDATES})
    assert line["choice"]["layout"] == "mid" and line["choice"]["hot_pieces"] > 1
    assert line["baselines"] == {"uniform-paging": {"steady_us": 1e6}}
    assert line["candidates"][0]["steady_us"] == line["choice"]["steady_us"]
    assert any(c.get("final") for c in line["candidates"])
    # a first look at all, a full one at the choice and the finalists
    assert sum(not quick for _, quick in gpu.readings) <= 1 + 3 * (grid.FINALISTS + 1)
    # flat reads 16 times as much: not measured
    assert ("flat", True) not in gpu.readings and "flat" not in str(line["candidates"])
    bare = measure_point(SHARED, gpu(SHARED), PROFILE, set())
    assert BASELINES not in bare and CANDIDATES not in bare
    assert bare["floor_us"] == pytest.approx((36864 + 96 * 512) * 4096 / 4.25e6)


def test_finalists_have_the_median_of_their_later_readings():
    class Noisy(MadeUpGpu):
        def steady(self, split, tokens_read, quick=False):
            us, error = super().steady(split, tokens_read, quick)
            return (us * 0.97 if quick else us * 1.01), error  # a lucky first look

    gpu = Noisy()
    line = measure_point(SHARED, gpu(SHARED), PROFILE, {CANDIDATES})
    final = [c["steady_us"] for c in line["candidates"] if c.get("final")]
    assert len(final) >= 2 and len(set(final)) == 1  # no one keeps its luck
    assert line["choice"]["steady_us"] == final[0]


def test_a_candidate_that_fails_is_noted_and_a_choice_that_fails_is_a_failed_point(tmp_path):
    class Broken(MadeUpGpu):
        broken = "mid"

        def steady(self, split, tokens_read, quick=False):
            if split.layout.name == self.broken:
                raise Unsupported("out of shared memory")
            return super().steady(split, tokens_read, quick)

    gpu, path = Broken(), tmp_path / "grid.jsonl"
    run_grid([SHARED], path, gpu, PROFILE, RUN, set())
    assert "shared memory" in read_results(path)[0]["failed"]
    gpu.broken = "many"
    run_grid([SHARED], path, gpu, PROFILE, RUN, {CANDIDATES})  # a failed point is tried again
    line = read_results(path)[0]
    assert "failed" not in line
    assert {"failed", "layout"} <= set(next(c for c in line["candidates"] if c["layout"] == "many"))


def test_a_second_run_continues(tmp_path):
    gpu, path, points = MadeUpGpu(), tmp_path / "grid.jsonl", POINTS[120:126]
    assert run_grid(points[:2], path, gpu, PROFILE, RUN, set()) == 0
    with path.open("a") as file:
        file.write('{"point": 122, "dig')  # killed while it wrote
    assert run_grid(points, path, gpu, PROFILE, RUN, set()) == 0
    assert gpu.opened == [120, 121, 122, 123, 124, 125]
    assert sorted(read_results(path)) == gpu.opened
    run_grid(points[:1], path, gpu, PROFILE, RUN, {BASELINES})  # asks for more than the line has
    run_grid(points[:1], path, gpu, PROFILE, RUN, set())
    assert gpu.opened[6:] == [120] and BASELINES in read_results(path)[120]
    moved = replace(points[1], suffix_len=33)  # another point of the same number
    run_grid([moved], path, gpu, PROFILE, RUN, set())
    assert gpu.opened[7:] == [121]


def test_time_runs_out_between_points(tmp_path):
    now = [0.0]

    class Slow(MadeUpGpu):
        def steady(self, split, tokens_read, quick=False):
            now[0] += 10
            return super().steady(split, tokens_read, quick)

    gpu, path, said = Slow(), tmp_path / "grid.jsonl", []
    points = POINTS[120:126]
    arguments = (path, gpu, PROFILE, RUN, set())
    left = run_grid(points, *arguments, 20.1, said.append, lambda: now[0])
    assert left == 4 and len(read_results(path)) == 2 and "out of time" in said[-1]
    # the estimate counts: the next one would end too late although time is left
    left = run_grid(
        points, *arguments, estimate_s(points[2], False, False) / 2, said.append, lambda: now[0]
    )
    assert left == 4 and gpu.opened == [120, 121]


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "grid.jsonl"
    run_grid([SHARED], path, MadeUpGpu(), PROFILE, RUN, set())
    with pytest.raises(InvalidArgument, match="results of Another"):
        run_grid([SHARED], path, MadeUpGpu(), PROFILE, RUN | {"gpu": "Another"}, set())
    for text in ("notes\n", json.dumps({"cases": []})):
        path.write_text(text)
        with pytest.raises(InvalidArgument, match="a result file of the grid"):
            read_results(path)
        assert path.read_text() == text


def test_effort_follows_the_length_of_a_step():
    tiny, huge = POINTS[120], max(POINTS, key=lambda p: p.kv_bytes)
    many, few = effort(tiny, tiny.case.unique_tokens), effort(huge, huge.case.unique_tokens)
    assert (many.num_layers, many.evict) == (8, True) and (few.num_layers, few.evict) == (1, False)
    assert many.repeats > few.repeats >= 3
    assert effort(tiny, tiny.case.unique_tokens, quick=True).repeats < many.repeats
    assert (
        estimate_s(huge, True, True)
        > estimate_s(huge, True, False)
        > estimate_s(huge, False, False)
    )
