"""Host time of the plugin's enqueue, layout by layout, as a result file:

    python -m tests.plugin.enqueue_times --json docs/results/plugin-enqueue-H200.json

The C++ host calls enqueue as TensorRT does, eagerly; the device is waited for between two calls, so
that no queue is full. Library and host are those of the tests (README of trtllm_plugin).
"""

from __future__ import annotations

import argparse  # typer may be missing on a GPU machine
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from granikv.attention.variants import LAYOUTS
from granikv.bench.harness import Case, result_record, write_json
from granikv.errors import Unavailable
from tests.kernels.support import Row, Step
from tests.plugin.conftest import make_host, make_library
from tests.plugin.plugin_support import prepared, run_host, whole_blocks, write_step

AIM_US = 15.0
HEADS, HEAD_DIM = (32, 8), 128  # Llama-3.1-8B at tp 1
GROUPS, GROUP_ROWS, PREFIX_LEN = 4, 16, 256
ROWS = [
    Row([(group, 8 + group * PREFIX_LEN, PREFIX_LEN)], 20 + 3 * i)
    for group in range(GROUPS)
    for i in range(GROUP_ROWS)
]


def step_of(layout: str, heads: tuple[int, int], dim: int) -> Step:
    """64 decode rows in 4 groups, HOT and COLD both."""
    made = LAYOUTS[layout]
    return Step(
        whole_blocks(ROWS, made), heads, dim, torch.bfloat16, layout=made, num_sms=132,
        capacity=8192, cold_from=8 + GROUPS * PREFIX_LEN,
    )  # fmt: skip


def measure(
    host: Path,
    library: Path,
    repeats: int,
    heads: tuple[int, int] = HEADS,
    dim: int = HEAD_DIM,
    **options: Any,
) -> list[Case]:
    """A case per layout, ratio: the aim over the median. options: of run_host."""
    cases = []
    with tempfile.TemporaryDirectory(prefix="granikv_enqueue_") as place:
        for layout in LAYOUTS:
            folder = Path(place, layout)
            folder.mkdir()
            step = step_of(layout, heads, dim)
            write_step(step, folder, prepared(step), time=repeats)
            said = run_host(host, library, "run", folder, **options)
            found = re.search(r"^enqueue_us (\S+) (\S+)$", said, re.MULTILINE)
            assert found is not None, said
            median_us, p90_us = map(float, found.groups())
            params = {
                "layout": layout, "rows": len(step.q), "groups": GROUPS, "num_qo_heads": heads[0],
                "num_kv_heads": heads[1], "head_dim": dim, "dtype": "bfloat16", "repeats": repeats,
            }  # fmt: skip
            metrics = {"enqueue_us": round(median_us, 2), "p90_us": round(p90_us, 2)}
            aim = {"enqueue_us": AIM_US}
            cases.append(Case(f"enqueue-{layout}", params, metrics, "aim", AIM_US / median_us, aim))
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure enqueue on this machine's GPU.")
    parser.add_argument("--json", type=Path, required=True, help="the result file")
    parser.add_argument("--repeats", type=int, default=1000, help="enqueues of a layout")
    given = parser.parse_args()
    try:
        if not torch.cuda.is_available():
            raise Unavailable("enqueue_times: expected a GPU, got none")
        cases = measure(make_host(), make_library(), given.repeats)
    except Unavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_json(given.json, result_record(cases))
    for case in cases:
        print("{enqueue_us:7.2f} us, p90 {p90_us:7.2f} us  ".format(**case.metrics) + case.case)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
