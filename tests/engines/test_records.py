"""What a second run keeps: never what other sources made, and no trouble from a damaged record."""

import json

import pytest

from granikv.engines import build as build_module
from granikv.engines import trtllm_checkpoint
from granikv.engines.manifest import FileEntry
from granikv.engines.records import RankRecord, file_hash

GRAPH = {"key": "k", "notes": {}, "files": [{"name": "x", "size_bytes": 1, "sha256": "0"}]}


def outside(file):
    return {"graph": GRAPH | {"files": [file | {"name": "../x"}]}}


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "null",
        "[" * 100_000,
        '{"graph": []}',
        json.dumps(outside(GRAPH["files"][0])),
        json.dumps({"graph": GRAPH | {"files": 3}}),
    ],
)
def test_a_damaged_record_has_nothing_finished_and_is_replaced(tmp_path, content):
    (tmp_path / "rank0.json").write_text(content)
    record = RankRecord(tmp_path, 0)
    assert record.finished("graph", "k") is None
    (tmp_path / "x").write_bytes(b"x")
    files = [FileEntry("x", 1, file_hash(tmp_path / "x"))]
    record.store("graph", "k", files)
    assert RankRecord(tmp_path, 0).finished("graph", "k") == files


def test_a_record_without_the_builders_notes_is_not_finished(tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    file = {"name": "x", "size_bytes": 1, "sha256": file_hash(tmp_path / "x")}
    (tmp_path / "rank0.json").write_text(json.dumps({"engine": {"key": "k", "files": [file]}}))
    assert RankRecord(tmp_path, 0).finished("engine", "k") is None


@pytest.mark.parametrize("hash_of", [build_module._source_hash, trtllm_checkpoint._source_hash])
@pytest.mark.parametrize("name", ["graph", "checkpoint_module", "gguf_loader", "layers"])
def test_weights_are_made_again_by_other_sources(tmp_path, monkeypatch, hash_of, name):
    before = hash_of()
    changed = tmp_path / "changed.py"
    changed.write_text("changed")
    monkeypatch.setattr(getattr(build_module, name), "__file__", str(changed))
    assert hash_of() != before
