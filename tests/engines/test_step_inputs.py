"""What a step tells an engine by shapes alone: the numbers that the plugin launches by."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from granikv.attention.plan_buffers import PlanBuffers
from granikv.attention.variants import LAYOUTS
from granikv.config import ModelConfig
from granikv.engines.io import MAX_BINDINGS, BuildLimits, attention_shape_of
from granikv.engines.manifest import engine_io
from granikv.engines.sharding import Shard
from granikv.engines.step_inputs import StepInputs
from granikv.errors import InvalidArgument

MODEL = ModelConfig("LlamaForCausalLM", 2, 128, 256, 8, 2, 16, 101, 256)
LIMITS = BuildLimits(max_requests=40, max_tokens=64, max_seq_len=128, capacity_tokens=1024)
BINDING = 7
IO = engine_io(Shard(MODEL), LIMITS, "bfloat16")


@pytest.fixture(scope="module")
def inputs() -> StepInputs:
    shape = attention_shape_of(MODEL, "bfloat16")
    buffers = PlanBuffers(shape, IO.capacities, torch.device("cpu"), 1)
    slots = torch.zeros(LIMITS.max_requests + 1, LIMITS.max_seq_len, dtype=torch.int32)
    return StepInputs(IO, buffers, slots, BINDING)


def prepared(inputs, name="mid", **changes):
    """The inputs after a plan of eight decode rows in layout `name`, with other sizes."""
    sizes = {
        "plan": inputs.buffers.plan, "layout": SimpleNamespace(name=name), "num_rows": 8,
        "num_decode_rows": 8, "hot_grid": 3, "cold_grid": 5, "num_tiles": 2, "row_tiles": 4,
        "has_runs": True,
    }  # fmt: skip
    made = object.__new__(StepInputs)
    vars(made).update(vars(inputs) | {"buffers": SimpleNamespace(**(sizes | changes))})
    return made


@pytest.mark.parametrize("index,name", list(enumerate(LAYOUTS)))
def test_launch_dims_are_the_prepared_plans(inputs, index, name):
    shapes = prepared(inputs, name).shapes(8, 6)
    assert shapes["launch_dims"] == (0, index, 4, 1, 1, BINDING)
    assert (shapes["token_ids"], shapes["sample_rows"]) == ((8,), (6,))
    assert shapes["row_request"] == shapes["slot_mapping"] == (8,)
    assert (shapes["hot_items"], shapes["cold_items"]) == ((3, 8), (5, 8))
    assert shapes["extend_tiles"] == (2, 2)
    assert prepared(inputs, name, has_runs=False).shapes(8, 6)["launch_dims"][3] == 0


@pytest.mark.parametrize("decode,rows,padded,expected", [(0, 8, 8, 0), (0, 8, 9, 1), (8, 8, 9, 1)])
def test_padding_is_written_like_a_decode_row(inputs, decode, rows, padded, expected):
    """Only the merge writes zeros for rows behind the plan's."""
    made = prepared(inputs, num_decode_rows=decode, num_rows=rows)
    assert made.shapes(padded, 1)["launch_dims"][4] == expected


def largest() -> dict[str, int]:
    """Sizes of the largest step that the executor may make of these limits."""
    stacked = LIMITS.max_requests * MODEL.gqa_group_size
    shape = attention_shape_of(MODEL, "bfloat16")
    block_m = min(layout.hot.fit(shape).block_m for layout in LAYOUTS.values())
    return {
        "hot_grid": IO.capacities.max_hot_items,
        "cold_grid": IO.capacities.max_cold_items,
        "num_tiles": IO.capacities.max_rows + IO.capacities.max_requests,
        "row_tiles": -(-stacked // block_m),
    }


def test_the_largest_step_fits_the_engine(inputs):
    shapes = prepared(inputs, **largest()).shapes(LIMITS.max_tokens, LIMITS.max_requests)
    assert shapes["sample_rows"] == (LIMITS.max_requests,)
    assert IO.ranges["binding"] == (0, 0, MAX_BINDINGS - 1)


@pytest.mark.parametrize("size", [*largest(), "samples", "rows"])
def test_a_step_above_it_is_refused_by_name(inputs, size):
    changes = {size: largest()[size] + 1} if size in largest() else {}
    rows = LIMITS.max_tokens + (size == "rows")
    samples = LIMITS.max_requests + (size == "samples")
    with pytest.raises(InvalidArgument, match=size.removeprefix("num_")):
        prepared(inputs, **changes).shapes(rows, samples)
