"""`granikv build`: its options, its progress and its summary."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from granikv.cli_common import clear_errors, print_sections

if TYPE_CHECKING:
    from granikv.engines.manifest import Manifest


# Options of everything that is built from a checkpoint.
CheckpointPath = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="Hugging Face folder or GGUF file; the embedded model if absent."
    ),
]
Ranks = Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")]
ElementType = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
MaxBatch = Annotated[int, typer.Option(min=1, help="Most requests running at once.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most rows of a step.")]
MaxSeq = Annotated[
    int, typer.Option(min=0, help="Longest sequence, tokens; 0: the context, at most 8192.")
]
Capacity = Annotated[int, typer.Option(min=2, help="Largest KV arena, tokens.")]


def build(
    out: Annotated[Path, typer.Option(help="Folder of graphs, engines and manifest.json.")],
    checkpoint: CheckpointPath = None,
    tp: Ranks = 1,
    dtype: ElementType = "bfloat16",
    max_batch: MaxBatch = 256,
    max_tokens: MaxTokens = 512,
    max_seq: MaxSeq = 0,
    capacity: Capacity = 65536,
    builder: Annotated[
        str,
        typer.Option(
            help="tensorrt, rtx, none (stop at ONNX) or auto: tensorrt where it is installed."
        ),
    ] = "auto",
    plugin: Annotated[
        Path | None, typer.Option(help="GraniKV's plugin library, for tensorrt and rtx.")
    ] = None,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(
            help="Of the GPUs to build for, rtx only: like 8.9; may be repeated. This GPU if absent."
        ),
    ] = None,
) -> None:
    """Build one graph and one engine per tensor-parallel rank, and their manifest.

    Finished ranks are kept: a second run makes only what is missing or different.
    """
    with clear_errors():
        from granikv.engines.build import BuildSettings
        from granikv.engines.build import build as build_engines

        made: list[str] = []

        def progress(
            what: str, total: int | None
        ) -> contextlib.AbstractContextManager[Callable[[int], None]]:
            made.append(what)
            return progress_bar(what, total)

        manifest = build_engines(
            BuildSettings(
                checkpoint=checkpoint,
                out=out,
                tp_size=tp,
                dtype=dtype,
                max_requests=max_batch,
                max_tokens=max_tokens,
                max_seq_len=max_seq,
                capacity_tokens=capacity,
                builder=builder,
                plugin=plugin,
                compute_capabilities=tuple(compute_capability or ()),
            ),
            progress,
        )
        _print_summary(manifest, out, "made" if made else "kept: nothing had changed")


@contextlib.contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description}"), BarColumn()]
    if total is not None:
        columns += [DownloadColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)
        bar.update(task, total=total or 1, completed=total or 1)


def _print_summary(manifest: Manifest, out: Path, files_were: str) -> None:
    files = {}
    for rank, entries in enumerate(manifest.ranks):
        present = [x for x in (entries.graph, entries.weights, entries.engine) if x is not None]
        files[f"rank {rank}"] = ", ".join(f"{x.name} {x.size_bytes / 1e6:.1f} MB" for x in present)
    built = {
        "folder": str(out),
        "files": files_were,
        "model": manifest.model.architecture,
        "tp": manifest.tp_size,
        "dtype": manifest.dtype,
        "builder": manifest.builder,
        "TensorRT": manifest.tensorrt_version or "not used: ONNX only",
        "compute capability": ", ".join(manifest.compute_capabilities) or "-",
        "plugin interface": manifest.plugin_abi_hash,
        "plugin library": manifest.plugin_sha256[:16] or "-",
    }
    print_sections({"built": built, "files": files})
