"""A real Triton server on changed copies of the model repository: its instances, and its GPUs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from granikv.errors import InvalidArgument, ModelFileError
from granikv.serving.run_dir import RunDir, failure_for_launcher
from granikv.serving.server_handle import is_input
from granikv.serving.tritonserver import find_model_repository
from tests.serving.conftest import needs_triton, start_server


def changed_repository(folder: Path, old: str, new: str) -> Path:
    """A copy of the model repository with one text of its config.pbtxt replaced."""
    shutil.copytree(find_model_repository() / "granikv", folder / "granikv")
    config = folder / "granikv" / "config.pbtxt"
    assert config.read_text().count(old) == 1
    config.write_text(config.read_text().replace(old, new))
    return folder


@needs_triton
def test_two_instances_are_refused(tmp_path):
    models = changed_repository(tmp_path / "models", "count: 1 }", "count: 2 }")
    reason = "instance_group: count: expected 1: .*replicas.*, got 2"
    with pytest.raises(ModelFileError, match=f"config.pbtxt: .*{reason}") as refused:
        start_server(tmp_path / "log", model_repository=models).__enter__()
    assert is_input(refused.value)  # the launcher ends with 2


@needs_triton
def test_the_engine_sees_the_gpus_that_config_names(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    old = 'key: "devices" value { string_value: "" }'
    models = changed_repository(tmp_path / "models", old, old.replace('""', '"1"'))
    with start_server(tmp_path / "log", model_repository=models) as server:
        environ = Path(f"/proc/{server.pids['engine']}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=7" in environ


@pytest.mark.parametrize("error", [InvalidArgument("count", 2, "one\nof it"), ValueError("odd")])
def test_the_launcher_reads_what_the_stub_failed_with(error, tmp_path, monkeypatch):
    monkeypatch.setenv("GRANIKV_RUN_DIR", str(tmp_path))
    folder = RunDir(tmp_path)
    assert folder.failure() == ("", "")
    with pytest.raises(type(error)), failure_for_launcher():
        raise error
    assert folder.failure() == (str(error), getattr(error, "code", "INTERNAL"))
    folder.close()
