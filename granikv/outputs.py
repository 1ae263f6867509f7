"""Checks places to write to before any work is done for them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from granikv.errors import InvalidArgument


def check_output_file(name: str, path: Path) -> None:
    """`name` is the option. Raises InvalidArgument when no file can be written at `path`."""
    if path.is_dir():
        raise InvalidArgument(name, str(path), "a file, not a folder")
    if not path.parent.is_dir():
        raise InvalidArgument(name, str(path), f"a file in a folder that exists ({path.parent})")
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        expected = f"a file that can be written ({error.strerror})"
        raise InvalidArgument(name, str(path), expected) from None
    if is_new:
        path.unlink()


def check_output_folder(name: str, path: Path) -> None:
    """Makes the folder. Raises InvalidArgument when no file can be written in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        expected = f"a folder that can be written ({error.strerror})"
        raise InvalidArgument(name, str(path), expected) from None
