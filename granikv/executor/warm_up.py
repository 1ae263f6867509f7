"""Compiling every kernel that a step can launch, before the first request comes.

The steps that reach them are rehearsed by the executor's own code: its launches are noted, none
is made, so that no kernel writes anything; then the noted kernels are compiled side by side.

    model       depends on the rows of a decode step (buckets) and on whether there are others
    attention   on the layout, and on which of HOT, COLD and RUN items there are, few or many

It knows no kernel: what a plan leads to is what the launching code makes of it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import product

import numpy as np

from granikv.attention.rehearsal import NotedLaunch
from granikv.attention.variants import LAYOUTS
from granikv.core import ColdItem, Count, HotItem, PlanCapacities, SpanKind, StepPlan

log = logging.getLogger(__name__)

HOT_TOKENS = 4096  # of the item that stands for all; above any tile
MAX_COMPILERS = 16  # threads; a tenth of a compilation is Python, one at a time


def decode_plan(num_rows: int) -> StepPlan:
    """num_rows requests of one token each, of which every row decodes and samples."""
    rows = np.arange(num_rows, dtype=np.int32)
    plan = _empty_plan(num_rows)
    cold = np.zeros((num_rows, 8), np.int32)
    cold[:, ColdItem.ROW] = cold[:, ColdItem.FIRST_PARTIAL] = rows
    cold[:, ColdItem.KIND], cold[:, ColdItem.LEN] = SpanKind.SLOTS, 1
    counts = {
        Count.NUM_DECODE_ROWS: num_rows, Count.NUM_COLD_ITEMS: num_rows,
        Count.NUM_PARTIALS: num_rows, Count.NUM_SAMPLE_ROWS: num_rows,
    }  # fmt: skip
    return replace(
        plan,
        counts=_counts(plan, counts),
        cold_items=cold,
        merge_indptr=np.arange(num_rows + 1, dtype=np.int32),
        merge_partials=rows,
        sample_rows=rows,
        layout="flat",
    )


def extend_plan(num_rows: int) -> StepPlan:
    """One request of num_rows rows, of which the last samples."""
    plan = _empty_plan(num_rows)
    counts = {
        Count.NUM_EXTEND_REQUESTS: 1, Count.NUM_EXTEND_SEGMENTS: 1, Count.NUM_SAMPLE_ROWS: 1,
    }  # fmt: skip
    return replace(
        plan,
        counts=_counts(plan, counts),
        row_position=np.arange(num_rows, dtype=np.int32),
        qo_indptr=np.array([0, num_rows], np.int32),
        extend_indptr=np.array([0, 1], np.int32),
        extend_segments=np.array([[SpanKind.SLOTS, 0, num_rows, 0, 0, 0, 0, 0]], np.int32),
        sample_rows=np.array([num_rows - 1], np.int32),
    )


def attention_plans(capacities: PlanCapacities) -> Iterator[StepPlan]:
    """One decode row in every layout; nothing but prepare and the launches can take them.

    What is launched depends on whether there are HOT items and RUN items, and on the number of COLD
    items by one threshold, so the least and the most reach all that lies between.
    """
    most = min(capacities.max_cold_items, capacities.max_partials - 1)
    for name in LAYOUTS:
        num_hot = int(name != "flat")  # the only layout without HOT items, and none has it with
        for num_cold, kind in product((0, 1, most), SpanKind):
            if num_hot or num_cold:
                yield _attention_plan(name, num_hot, num_cold, kind)


def _attention_plan(layout: str, num_hot: int, num_cold: int, kind: SpanKind) -> StepPlan:
    plan = _empty_plan(1)
    hot, cold = np.zeros((num_hot, 8), np.int32), np.zeros((num_cold, 8), np.int32)
    hot[:, HotItem.NUM_ROWS], hot[:, HotItem.KV_LEN] = 1, HOT_TOKENS
    cold[:, ColdItem.KIND], cold[:, ColdItem.LEN] = kind, 1
    num_partials = num_hot + num_cold
    counts = {
        Count.NUM_DECODE_ROWS: 1, Count.NUM_HOT_ITEMS: num_hot, Count.NUM_HOT_ROWS: num_hot,
        Count.NUM_COLD_ITEMS: num_cold, Count.NUM_PARTIALS: num_partials,
    }  # fmt: skip
    return replace(
        plan,
        counts=_counts(plan, counts),
        hot_items=hot,
        hot_rows=np.zeros(num_hot, np.int32),
        cold_items=cold,
        merge_indptr=np.array([0, num_partials], np.int32),
        merge_partials=np.arange(num_partials, dtype=np.int32),
        layout=layout,
    )


def _empty_plan(num_rows: int) -> StepPlan:
    """Rows of request 0 at position 0, which neither decode nor extend."""
    zeros, none = np.zeros(num_rows, np.int32), np.zeros(0, np.int32)
    items, start = np.zeros((0, 8), np.int32), np.zeros(1, np.int32)
    counts = np.zeros(16, np.int32)
    counts[Count.NUM_ROWS] = num_rows
    return StepPlan(
        -1, counts, zeros, zeros, zeros, zeros, hot_items=items, hot_rows=none, cold_items=items,
        merge_indptr=start, merge_partials=none, qo_indptr=start, extend_indptr=start,
        extend_segments=items, sample_rows=none, slot_writes=np.zeros((0, 3), np.int32),
    )  # fmt: skip


def _counts(plan: StepPlan, counts: dict[Count, int]) -> np.ndarray:
    made = plan.counts.copy()
    made[list(counts)] = list(counts.values())
    return made


def compile_launches(
    launches: Sequence[NotedLaunch],
    num_threads: int,
    take_device: Callable[[], None],
    show_progress: bool,
) -> int:
    """The kernels that compiled; one that does not is logged, and fails the step that wants it.

    take_device: called by each thread first.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    console, failed = Console(stderr=True), []
    with (
        Progress(*columns, console=console, disable=not show_progress, transient=True) as bar,
        ThreadPoolExecutor(num_threads, "granikv-compile", initializer=take_device) as pool,
    ):
        task = bar.add_task("compiling kernels", total=len(launches))
        waiting = {pool.submit(launch.compile): launch for launch in launches}
        for future in as_completed(waiting):
            bar.advance(task)
            if future.exception() is not None:
                failed.append(waiting[future])
    # Python 3.11's ast counts its depth over all threads and may say SystemError: again, alone
    return len(launches) - len(failed) + sum(_compiles(launch) for launch in failed)


def _compiles(launch: NotedLaunch) -> bool:
    try:
        launch.compile()
    except Exception as error:
        log.warning("%s: does not compile here: %s", launch.name, error)
        return False
    return True


def num_compilers(num_ranks: int) -> int:
    """Threads of one rank."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(MAX_COMPILERS, cores // num_ranks))
