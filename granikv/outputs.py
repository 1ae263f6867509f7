"""Places to write to: checked before any work is done for them, and files that appear whole."""

from __future__ import annotations

import os
import tempfile
import threading
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


def write_atomically(path: Path, content: bytes) -> None:
    """The whole content or, after an interruption, the file that was there before.

    What a killed process leaves is named *.partial. Raises OSError.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
