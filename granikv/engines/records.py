"""rank{r}.json: which files of a rank are finished, and from which inputs they were made.

A second run makes only what is missing or different.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from granikv.engines.manifest import FileEntry
from granikv.errors import Unavailable
from granikv.outputs import write_atomically

HASH_BYTES = 16 * 2**20  # read at a time


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """The folder, made if missing, for this build alone; what a killed one left half is removed.

    Raises Unavailable while another build has it, and when a write fails inside.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Unavailable(
                    f"{folder}: another build writes into it; wait for its end or name another"
                ) from None
            for left in folder.glob("*.partial"):
                left.unlink()
            yield
        finally:
            os.close(handle)
    except OSError as error:
        raise Unavailable(f"{error.filename or folder}: {error.strerror}") from error


class RankRecord:
    """rank{r}.json: per stage the key of its inputs, its files and what the builder told."""

    def __init__(self, folder: Path, rank: int):
        self.folder = folder
        self.path = folder / f"rank{rank}.json"
        try:
            stages = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            stages = None
        self._stages: dict = stages if isinstance(stages, dict) else {}

    def finished(self, stage: str, key: str) -> list[FileEntry] | None:
        """The files, if they were made from the same inputs and are whole."""
        try:
            entry = self._stages[stage]
            files = [FileEntry(**x) for x in entry["files"]]
            if entry["key"] != key or not isinstance(entry["notes"], dict):
                return None
        except (KeyError, TypeError, ValueError):
            return None
        for file in files:
            path = self.folder / file.name
            if not path.is_file() or path.stat().st_size != file.size_bytes:
                return None
            if file_hash(path) != file.sha256:
                return None
        return files

    def notes(self, stage: str) -> dict:
        return self._stages[stage]["notes"]

    def store(
        self, stage: str, key: str, files: list[FileEntry], notes: dict | None = None
    ) -> None:
        entry = {"key": key, "files": [asdict(x) for x in files], "notes": notes or {}}
        self._stages[stage] = entry
        write_atomically(self.path, json.dumps(self._stages, indent=1).encode())


def key_of(*parts: object) -> str:
    """Hex digest of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()
