"""The folder where launcher, stub and engine process find each other: pid files, sockets, a lock.

The launcher keeps a file of it locked. However the launcher dies, the system drops the lock; the
stub waits for that, so no server outlives its launcher. A lock is not a pid: it cannot be used
again by another process, and the thread that started the server may end before the launcher does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from granikv import env
from granikv.errors import GraniKVError, InvalidArgument
from granikv.serving import env_folder

FOLDER_PREFIX = "granikv_"  # of temporary folders
LOCK = "launcher.lock"
SHM = Path("/dev/shm")
SHM_PREFIX = re.compile(r"granikv_\d+_[0-9a-f]+_")  # server_handle.py makes it
SHM_LOCK = "lock"  # behind the prefix: held by the launcher of the server whose memory it is
FAILURE = "stub.failure"
STATE_FILES = ("stub.pid", "engine.pid", "engine.drained", FAILURE)
LINKS = "home"  # of the server's backend; see tritonserver.py
LONGEST_SOCKET = "/e4194304.out"  # engine_client.py
MAX_SOCKET_PATH = 107  # bytes, of a Unix socket
CLAIM_TIMEOUT_S = 5.0  # what a killed launcher left may need a moment to go


class RunDir:
    """One launcher's folder; it keeps the lock until `close`.

    wanted: made if missing, and kept; None: a temporary one. Raises InvalidArgument when the
    folder cannot be used or another launcher has it.
    """

    def __init__(self, wanted: Path | None = None):
        self.is_temporary = wanted is None
        try:
            remove_stale_folders()
            remove_stale_memory()
            self._memory_lock: TextIO | None = None
            self._lock = _claim(wanted)
            self.lock_path = Path(self._lock.name)
            self.path = self.lock_path.parent
            remove_noted(self.lock_path)  # of a launcher that was killed
            self.note("")
        except OSError as error:
            expected = (
                f"a folder to write in that no other launcher has ({error.strerror or error})"
            )
            got = str(wanted) if wanted else "a temporary folder"
            raise InvalidArgument("GRANIKV_RUN_DIR", got, expected) from None
        self.clean()

    def claim_memory(self, shm_prefix: str) -> None:
        """As that of a living launcher's server; the one before is gone. Raises OSError."""
        if self._memory_lock is not None:
            self._memory_lock.close()
        while True:
            with contextlib.suppress(BlockingIOError):  # another launcher looked at it
                self._memory_lock = lock_file(SHM / f"{shm_prefix}{SHM_LOCK}")
                return

    def note(self, shm_prefix: str, tritons: Path | None = None) -> None:
        """What has to be removed when the launcher is gone; tritons: see env_folder.py.

        Raises OSError. Not through the file's buffer: what could not be written would be written
        again by its close."""
        noted = {"shm_prefix": shm_prefix, "is_temporary": self.is_temporary}
        noted["env_folder"] = str(tritons or "")
        try:
            os.ftruncate(self._lock.fileno(), 0)
            os.write(self._lock.fileno(), json.dumps(noted).encode())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.lock_path)) from None

    def read_pid(self, name: str) -> int | None:
        """name: "stub" or "engine"; None before it has started."""
        try:
            return int((self.path / f"{name}.pid").read_text())
        except (OSError, ValueError):
            return None

    def failure(self) -> tuple[str, str]:
        """Why the model could not be loaded, as the stub said, and the code of that error; "" and ""
        when it said nothing."""
        try:
            code, _, reason = (self.path / FAILURE).read_text().partition("\n")
        except OSError:
            return "", ""
        return reason.strip(), code

    def clean(self) -> None:
        """Removes what a server's processes left."""
        remove_state(self.path)

    def close(self) -> None:
        remove_folder(self.path, self.is_temporary)
        self._lock.close()
        if self._memory_lock is not None:
            self._memory_lock.close()


def _claim(wanted: Path | None) -> TextIO:
    """The locked file of the wanted folder, or of a new temporary one."""
    deadline = time.monotonic() + CLAIM_TIMEOUT_S
    while True:
        path = Path(wanted or tempfile.mkdtemp(prefix=FOLDER_PREFIX)).absolute()
        if len(os.fsencode(f"{path}{LONGEST_SOCKET}")) > MAX_SOCKET_PATH:
            limit = MAX_SOCKET_PATH - len(LONGEST_SOCKET)
            raise InvalidArgument("GRANIKV_RUN_DIR", str(path), f"at most {limit} bytes of path")
        try:
            path.mkdir(parents=True, exist_ok=True)
            return lock_file(path / LOCK)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        if wanted:
            time.sleep(0.1)


def lock_file(path: Path) -> TextIO:
    """The file, opened and locked. Raises BlockingIOError when another process has the lock, or
    had it and removed the file: a lock on a file without a name would keep nobody out."""
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise BlockingIOError(errno.EAGAIN, "the lock's file was removed", str(path))
    except FileNotFoundError:
        file.close()
        raise BlockingIOError(errno.EAGAIN, "the lock's file was removed", str(path)) from None
    except OSError:
        file.close()
        raise
    return file


def remove_state(path: Path) -> None:
    sockets = (file for suffix in ("in", "out") for file in path.glob(f"e[0-9]*.{suffix}"))
    for file in (*(path / name for name in STATE_FILES), *sockets):
        file.unlink(missing_ok=True)


def remove_folder(path: Path, is_temporary: bool) -> None:
    """A folder that the user named stays, with the lock: two files of one name would be two locks."""
    if is_temporary:
        shutil.rmtree(path, ignore_errors=True)
        return
    remove_state(path)
    shutil.rmtree(path / LINKS, ignore_errors=True)


def remove_stale_folders() -> None:
    """Temporary folders, and the shared memory, of this user's launchers that were killed together
    with everything that would have removed them: folders whose lock nobody holds."""
    try:
        folder = Path(tempfile.gettempdir())
    except OSError:  # none that is writable, as on a full disk
        return
    for lock in folder.glob(f"{FOLDER_PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):
            if lock.parent.lstat().st_uid != os.getuid() or lock.parent.is_symlink():
                continue
            with lock_file(lock):
                remove_noted(lock)
                remove_folder(lock.parent, _noted(lock).get("is_temporary") is not False)


def remove_stale_memory() -> None:
    """Shared memory of this user's launchers that were killed and have no folder here that says so:
    files whose lock nobody holds. A lock, for a pid may be another's, or of another container."""
    for lock in SHM.glob(f"granikv_*_{SHM_LOCK}"):
        prefix = lock.name.removesuffix(SHM_LOCK)
        with contextlib.suppress(OSError):
            if SHM_PREFIX.fullmatch(prefix) and lock.lstat().st_uid == os.getuid():
                with lock_file(lock):
                    remove_shared_memory(prefix)


def remove_noted(lock: Path) -> None:
    """What the lock's last launcher noted and nobody removed."""
    remove_shared_memory(noted_prefix(lock))
    env_folder.remove_env_folder(noted_env_folder(lock))


def _noted(lock: Path) -> dict:
    try:
        noted = json.loads(lock.read_text())
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}


def noted_prefix(lock: Path) -> str:
    """The shared memory's prefix that the lock's last launcher noted; "" for none."""
    prefix = _noted(lock).get("shm_prefix")
    return prefix if isinstance(prefix, str) and SHM_PREFIX.fullmatch(prefix) else ""


def noted_env_folder(lock: Path) -> Path | None:
    name = _noted(lock).get("env_folder")
    return Path(name) if isinstance(name, str) and env_folder.NAME.fullmatch(name) else None


def remove_shared_memory(prefix: str) -> None:
    """prefix: of a server's file names; "" for none."""
    for path in SHM.glob(f"{prefix}*") if prefix else ():
        path.unlink(missing_ok=True)


# --- in the stub and in the engine process


def end_with_launcher() -> None:
    """Ends server, stub and engine process when the launcher that started them is gone.

    For the stub and for the engine process: each may be dead or stuck when the launcher dies.
    Without a launcher of ours (GRANIKV_LAUNCHER_LOCK not set) it does nothing.
    """
    lock = env.read("GRANIKV_LAUNCHER_LOCK")
    if lock is None:
        return
    pids = up_to_server()
    tritons = env_folder.find_env_folder(pids[-1], pids[-2]) if len(pids) > 1 else None
    try:
        file = lock.open()
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # as it should be: the launcher has it
        threading.Thread(target=_wait_and_end, args=(file, pids, tritons), daemon=True).start()
    except OSError:  # removed
        _end(pids, "")
    else:
        _wait_and_end(file, pids, tritons)


def up_to_server() -> list[int]:
    """This process and its parents up to the server; this one alone when there is no server."""
    pids = [os.getpid()]
    while (parent := _name_and_parent(pids[-1])[1]) > 1:
        pids.append(parent)
        if _name_and_parent(parent)[0].startswith("tritonserver"):
            return pids
    return pids[:1]


def _name_and_parent(pid: int) -> tuple[str, int]:
    """("", 0) for a process that is gone."""
    try:
        before, after = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)
    except OSError:
        return "", 0
    return before.partition("(")[2], int(after.split()[1])


def _wait_and_end(file: TextIO, pids: list[int], tritons: Path | None) -> None:
    """`pids` as from up_to_server; tritons: see env_folder.py.

    The lock is held to the end: the folder is not free before."""
    remove = ""  # made before the wait: behind it Python's lock may soon not be had
    if noted_prefix(lock := Path(file.name)):
        note = _noted(lock)
        folder = shlex.quote(str(lock.parent))
        names = f"{' '.join(STATE_FILES)} e[0-9]*.in e[0-9]*.out"
        files = f"cd {folder} && rm -rf {names} {LINKS}"
        remove = f"rm -f /dev/shm/{note['shm_prefix']}*; "
        remove += f"rmdir {tritons or ''} 2>/dev/null; "
        remove += f"rm -rf {folder}" if note["is_temporary"] else files
    fcntl.flock(file, fcntl.LOCK_SH)
    _end(pids, remove, file.fileno())


def _end(pids: list[int], remove: str, *descriptors: int) -> None:
    """By a shell: without its server the stub may hang with Python's lock held, and what is removed
    must not come again."""
    is_child = [_name_and_parent(pid)[1] == parent for pid, parent in itertools.pairwise(pids)]
    targets = [pids[0], *itertools.compress(pids[1:], is_child)]  # else the number may be another's
    script = f"kill -9 {' '.join(map(str, reversed(targets)))}; sleep 0.3; {remove}"
    subprocess.Popen(["/bin/sh", "-c", script], pass_fds=descriptors, start_new_session=True).wait()


@contextlib.contextmanager
def failure_for_launcher() -> Iterator[None]:
    """Leaves the error of a failed load where the launcher reads it."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(OSError):
            folder = env.read("GRANIKV_RUN_DIR")
            if folder is not None:
                code = getattr(error, "code", GraniKVError.code)
                (folder / FAILURE).write_text(f"{code}\n{error}\n")
        raise
