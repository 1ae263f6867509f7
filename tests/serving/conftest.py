"""One real Triton server with the fake engine for all protocol tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import missing_triton

ROOT = Path(__file__).resolve().parents[2]
FAKE_ENV = {
    "GRANIKV_ENGINE_CLASS": "tests.serving.fake_engine:FakeEngine",
    "PYTHONPATH": str(ROOT),
}
needs_triton = pytest.mark.skipif(bool(missing_triton()), reason=missing_triton())


def start_server(log_path: Path, **arguments):
    """A context manager: a running server with the fake engine."""
    from granikv.serving.launcher import running_server

    config = {"max_seq_len": 512, **arguments.pop("engine_config", {})}
    return running_server(
        config, env=FAKE_ENV, log_path=log_path, start_timeout_s=60.0, **arguments
    )


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    if reason := missing_triton():
        pytest.skip(reason)
    with start_server(tmp_path_factory.mktemp("triton") / "server.log") as handle:
        yield handle
