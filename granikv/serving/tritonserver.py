"""Finds a Triton server and builds its command and environment.

A server on PATH (the NGC image) is used as it is. Otherwise the one inside the nvidia-pytriton
wheel: its Python backend needs the stub of the running Python's minor version beside it, so a
home folder of links is made. Links, not copies: the stub finds its libraries relative to itself.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import resource
import shutil
import socket
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

from granikv.errors import InvalidArgument, NotFound

ERROR_LINE = re.compile(r"^E\d{4} |\berror:|Error: ", re.IGNORECASE)
HARMLESS = "CudaDriverHelper has not been initialized"  # of every start without a GPU
PORTS_PATIENCE_S = 0.6  # a killed server ends at once
MAX_REASON = 1000  # characters of a log in an error
# Of each thread of the server: address space, memory is what is used. Triton 2.51 parses an HTTP
# body on the stack and dies when that is full. Measured, what it survived and what killed it:
#   8 MB   text of 4 MB killed; 100,000 nested brackets, 600,000 chunks of a body too
#   64 MB  text of 30 MB, 60 MB killed; 200,000 nested brackets, 1,000,000 killed
#   256 MB text of 120 MB, 250 MB killed; 1,000,000 brackets that are never closed, 4,000,000 killed
# Not more: what a request filled stays with its thread, and nobody sends such texts in earnest.
STACK_BYTES = 256 << 20


@dataclass(frozen=True)
class TritonInstallation:
    binary: Path
    backend_directory: Path | None  # None: the server's own


@dataclass(frozen=True)
class ServerAddress:
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002

    def __post_init__(self) -> None:
        for name, port in self.ports.items():
            if not 1 <= port <= 65535:
                raise InvalidArgument(name, port, "1 to 65535")
            if list(self.ports.values()).count(port) > 1:
                raise InvalidArgument(name, port, "a port of its own: http, grpc, metrics")

    @property
    def ports(self) -> dict[str, int]:
        return {
            "http_port": self.http_port,
            "grpc_port": self.grpc_port,
            "metrics_port": self.metrics_port,
        }

    @property
    def http_url(self) -> str:
        return f"http://{self.host}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"{self.host}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.host}:{self.metrics_port}/metrics"


def check_ports(address: ServerAddress) -> None:
    """Raises InvalidArgument for a host that is none or a port that is taken, also a moment later:
    a server that just ended, or whose launcher was killed, may still hold its ports."""
    deadline = time.monotonic() + PORTS_PATIENCE_S
    for name, port in address.ports.items():
        while (error := _bind_error(address.host, port)) is not None:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                expected = f"an address of this machine ({error.strerror})"
                raise InvalidArgument("host", address.host, expected)
            if time.monotonic() > deadline:
                expected = f"a free port of {address.host} ({error.strerror})"
                raise InvalidArgument(name, port, expected)
            time.sleep(0.05)


def check_stack() -> None:
    """Warns when the hard limit is below STACK_BYTES."""
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if hard != resource.RLIM_INFINITY and hard < STACK_BYTES:
        print(
            f"granikv: warning: the hard limit of the stack (ulimit -Hs) is {hard >> 10} KiB, below "
            f"{STACK_BYTES >> 10} KiB: HTTP requests of {hard // 2 >> 10} KiB may end the server",
            file=sys.stderr,
        )


def _bind_error(host: str, port: int) -> OSError | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind((host, 0))
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()


def last_errors(log_path: Path, start: int = 0) -> str:
    """The last error lines of a server's log behind `start` bytes, joined; "" if there are none."""
    with log_path.open("rb") as log:
        log.seek(start)
        lines = log.read().decode(errors="replace").splitlines()
    errors = [line.strip() for line in lines if ERROR_LINE.search(line) and HARMLESS not in line]
    return " | ".join(errors)[-MAX_REASON:]


def find_tritonserver(home: Path) -> TritonInstallation:
    """home: folder for the links, made when needed. Raises NotFound."""
    on_path = shutil.which("tritonserver")
    if on_path:
        return TritonInstallation(Path(on_path), None)
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise NotFound(
            "tritonserver: not on PATH and nvidia-pytriton is not installed; run in Triton's "
            "image or `pip install --no-deps nvidia-pytriton==0.7.0`"
        )
    root = Path(spec.origin).parent / "tritonserver"
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    sources = (
        root / "backends/python/libtriton_python.so",
        root / "backends/python/triton_python_backend_utils.py",
        root / "python_backend_stubs" / minor / "triton_python_backend_stub",
    )
    folder = home / "backends" / "python"
    folder.mkdir(parents=True, exist_ok=True)
    for source in sources:
        if not source.exists():
            raise NotFound(f"{source}: the wheel has no file for Python {minor}")
        link = folder / source.name
        link.unlink(missing_ok=True)
        link.symlink_to(source)
    return TritonInstallation(root / "bin" / "tritonserver", home / "backends")


def server_command(
    installation: TritonInstallation,
    model_repository: Path,
    address: ServerAddress,
    shm_prefix: str,
    exit_timeout_s: int,
) -> list[str]:
    """shm_prefix: start of the server's file names in /dev/shm, unique to this server."""
    command = [
        str(installation.binary),
        f"--model-repository={model_repository}",
        "--disable-auto-complete-config",
        f"--http-address={address.host}",
        f"--http-port={address.http_port}",
        f"--grpc-address={address.host}",
        f"--grpc-port={address.grpc_port}",
        f"--metrics-address={address.host}",
        f"--metrics-port={address.metrics_port}",
        "--metrics-interval-ms=500",
        "--allow-gpu-metrics=false",
        "--pinned-memory-pool-byte-size=0",
        f"--exit-timeout-secs={exit_timeout_s}",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
    ]
    if installation.backend_directory is not None:
        command.append(f"--backend-directory={installation.backend_directory}")
    return command


def server_environment(extra: dict[str, str]) -> dict[str, str]:
    """The stub takes its packages from the python3 that is first on PATH and ignores PYTHONPATH."""
    environment = dict(os.environ) | extra
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.prefix) / "bin"), environment.get("PATH", "")]
    )
    libraries = [sysconfig.get_config_var("LIBDIR") or "", environment.get("LD_LIBRARY_PATH", "")]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(part for part in libraries if part)
    return environment


def find_model_repository() -> Path:
    """The repository of this checkout. Raises NotFound."""
    repository = Path(__file__).resolve().parents[2] / "model_repository"
    if not (repository / "granikv" / "config.pbtxt").exists():
        raise NotFound(f"{repository}: no model repository here; name it with --model-repository")
    return repository
