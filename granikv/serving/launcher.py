"""Runs a supervised Triton server: `python -m granikv.serving.launcher`, or `running_server`.

SIGTERM drains and exits 0; see server_handle.py for what is watched and what a death leads to.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from granikv.errors import GraniKVError
from granikv.serving.server_handle import ServerHandle, is_input
from granikv.serving.settings import parse_assignments
from granikv.serving.signals import sigterm_unwinds
from granikv.serving.tritonserver import ServerAddress, free_ports


@contextlib.contextmanager
def running_server(
    engine_config: dict | None = None,
    *,
    address: ServerAddress | None = None,
    supervised: bool = True,
    max_restarts: int = 3,
    **handle_arguments,
) -> Iterator[ServerHandle]:
    """A server on free ports that is ready on entry and stopped on exit.

    supervised: a thread restarts it when one of its processes dies.
    """
    handle = ServerHandle(
        address or ServerAddress("127.0.0.1", *free_ports(3)),
        engine_config=engine_config,
        **handle_arguments,
    )
    with sigterm_unwinds():
        try:
            handle.start()
        except BaseException:
            handle.kill()
            handle.close()
            raise
        thread = None
        if supervised:
            thread = threading.Thread(target=handle.supervise, args=(max_restarts,), daemon=True)
            thread.start()
        try:
            yield handle
        finally:
            handle.stop_requested.set()
            if thread is not None:
                thread.join()
            handle.stop()


def _count(text: str) -> int:
    """For argparse: an integer of at least 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0, got {text!r}")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="granikv.serving.launcher", description=__doc__)
    parser.add_argument("--model", help="GGUF file or Hugging Face folder; the embedded model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    parser.add_argument("--model-repository", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--engine-class", help="module:Class of the engine")
    parser.add_argument("--log", type=Path, help="file for the server's output")
    parser.add_argument(
        "--max-restarts",
        type=_count,
        default=5,
        help="within a minute, for deaths of the stub and the engine and for starts that fail",
    )
    parser.add_argument("--no-restart", action="store_true", help="exit 1 when a process dies")
    options = parser.parse_args(arguments)
    try:
        engine_config = parse_assignments(options.set)
        if options.model:
            engine_config["model"] = str(Path(options.model).resolve())
        env = {"GRANIKV_ENGINE_CLASS": options.engine_class} if options.engine_class else {}
        handle = ServerHandle(
            ServerAddress(options.host, options.http_port, options.grpc_port, options.metrics_port),
            options.model_repository,
            engine_config,
            env,
            options.log,
        )
    except GraniKVError as error:
        print(f"granikv: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: handle.stop_requested.set())
    try:
        handle.start()
    except GraniKVError as error:
        handle.close()
        print(f"granikv: {error}", file=sys.stderr)
        return 0 if handle.stop_requested.is_set() else 2 if is_input(error) else 1
    print(handle.ready_line(), flush=True)
    code = handle.supervise(0 if options.no_restart else options.max_restarts)
    return handle.stop() or code


if __name__ == "__main__":
    sys.exit(main())
