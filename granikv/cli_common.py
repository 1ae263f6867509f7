"""Options, errors and tables that the commands share."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from granikv.config import MAX_THREADS

if TYPE_CHECKING:
    from granikv.config import EngineConfig

ModelPath = Annotated[
    str | None,
    typer.Option(
        metavar="PATH", help="GGUF file or Hugging Face folder; the embedded model if absent."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A field of EngineConfig (`granikv inspect` lists them); may be repeated.",
    ),
]
Threads = Annotated[int, typer.Option(min=0, max=MAX_THREADS, help="Threads of torch; 0: its own.")]


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """What the user can mend ends the command with one line: exit 2 for bad input, 1 otherwise.

    Anything else is a defect and keeps its traceback.
    """
    from granikv.errors import GraniKVError, InvalidArgument, ModelFileError

    try:
        yield
    except GraniKVError as error:
        print(f"granikv: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, InvalidArgument | ModelFileError) else 1) from None
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name == "granikv":
            raise
        print(
            f"granikv: this command needs the package {name!r}; `make dev` installs everything",
            file=sys.stderr,
        )
        raise typer.Exit(1) from None
    except OSError as error:
        if error.filename is None:
            raise
        print(f"granikv: {error.filename}: {error.strerror}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def engine_config(settings: list[str] | None, model: str | None) -> EngineConfig:
    """As a server with these options and the environment would have it. Raises InvalidArgument."""
    from granikv import env
    from granikv.config import EngineConfig
    from granikv.serving.settings import check_engine_fields, parse_assignments

    variable = "GRANIKV_ENGINE_CONFIG"
    fields = check_engine_fields(env.read(variable), variable)
    fields |= parse_assignments(settings or [])
    if model is not None:
        fields["model"] = model
    return EngineConfig(**fields)


PIPED_WIDTH = 4096


def print_sections(sections: Mapping[str, Mapping[str, object]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from granikv.bench.report import format_value

    console = Console()
    if not console.is_terminal:  # a path stays in one piece for whoever reads it on
        console = Console(width=PIPED_WIDTH)
    for title, facts in sections.items():
        if not facts:
            continue
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in facts.items():
            table.add_row(name, format_value(value))
        console.print(table)
        console.print()
