#!/usr/bin/env python3
"""Writes a checkpoint folder for `trtllm-build`: config.json and one safetensors file per rank.

    python build_scripts/convert_checkpoint.py --checkpoint PATH --tp 2 --out out/checkpoint-tp2

No GPU, TensorRT or TensorRT-LLM is needed, and less memory than a rank's weights take.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from granikv.cli_build import (  # noqa: E402
    Capacity,
    CheckpointPath,
    ElementType,
    MaxBatch,
    MaxSeq,
    MaxTokens,
    Ranks,
    progress_bar,
)
from granikv.cli_common import clear_errors  # noqa: E402


def main(
    out: Annotated[Path, typer.Option(help="Folder of config.json and rank*.safetensors.")],
    checkpoint: CheckpointPath = None,
    tp: Ranks = 1,
    dtype: ElementType = "bfloat16",
    max_batch: MaxBatch = 256,
    max_tokens: MaxTokens = 512,
    max_seq: MaxSeq = 0,
    capacity: Capacity = 65536,
) -> None:
    """Convert a checkpoint for trtllm-build. Finished ranks are kept; stdout has the options that
    trtllm-build must be given for it.
    """
    with clear_errors():
        from granikv.engines.build import ExportSettings
        from granikv.engines.trtllm_checkpoint import OUR_KEY, convert

        settings = ExportSettings(
            checkpoint=checkpoint,
            out=out,
            tp_size=tp,
            dtype=dtype,
            max_requests=max_batch,
            max_tokens=max_tokens,
            max_seq_len=max_seq,
            capacity_tokens=capacity,
        )
        limits = convert(settings, progress_bar)[OUR_KEY]["limits"]
        print(
            f"--max_batch_size {limits['max_requests']} --max_num_tokens {limits['max_tokens']} "
            f"--max_seq_len {limits['max_seq_len']}"
        )


if __name__ == "__main__":
    typer.run(main)
