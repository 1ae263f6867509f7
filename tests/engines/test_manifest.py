"""Loading refuses what cannot run here: both values and the remedy, before anything is allocated."""

from __future__ import annotations

import dataclasses
import json

import pytest
from helpers import make_tiny_hf

from granikv.engines.build import BuildSettings, build
from granikv.engines.manifest import FileEntry, RankFiles, RuntimeFacts, load_manifest
from granikv.errors import EngineMismatch, InvalidArgument, ModelFileError, Unsupported


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Two ranks with engines that a TensorRT 10.14 for 9.0 might have written."""
    folder = tmp_path_factory.mktemp("built")
    out = folder / "out"
    model = make_tiny_hf(folder / "model", num_hidden_layers=1)
    manifest = build(BuildSettings(model, out, 2, max_seq_len=64, builder="none"))
    ranks = []
    for index, rank in enumerate(manifest.ranks):
        (out / f"rank{index}.engine").write_bytes(b"engine")
        entry = FileEntry(f"rank{index}.engine", 6, "")
        ranks.append(dataclasses.replace(rank, engine=entry))
    manifest = dataclasses.replace(
        manifest,
        ranks=tuple(ranks),
        builder="tensorrt",
        tensorrt_version="10.14.1.48",
        compute_capabilities=("9.0",),
        plugin_sha256="ab" * 32,
    )
    (out / "manifest.json").write_text(manifest.to_json())
    return out, manifest


def facts(manifest, **changes):
    own = RuntimeFacts("10.14.1.48", "9.0", manifest.plugin_sha256)
    return dataclasses.replace(own, **changes)


def test_engines_that_fit_are_accepted(built):
    out, manifest = built
    loaded = load_manifest(out)
    assert loaded == manifest
    loaded.check(out, 2, facts(manifest))
    loaded.check(out, 2, RuntimeFacts(), "graph")
    assert loaded.file(out, 1).name == "rank1.engine"


@pytest.mark.parametrize(
    "changes,parts",
    [
        ({"tensorrt_version": "10.15.0.1"}, ["TensorRT", "10.15.0.1", "10.14.1.48"]),
        ({"compute_capability": "10.0"}, ["compute capability", "10.0", "9.0"]),
        ({"plugin_sha256": "fe" * 32}, ["plugin library", "fe" * 32, "ab" * 32, "--plugin"]),
    ],
)
def test_another_runtime_is_refused(built, changes, parts):
    out, manifest = built
    with pytest.raises(EngineMismatch) as caught:
        manifest.check(out, 2, facts(manifest, **changes))
    text = str(caught.value)
    assert all(part in text for part in parts) and "granikv build" in text


def test_the_remedy_is_the_route_that_made_the_engines(built):
    out, manifest = built
    made = dataclasses.replace(manifest, builder="trtllm-build")
    for tp_size, changes, wanted in (
        (4, {}, "`build_scripts/build_engines.sh CHECKPOINT OUT 4`"),
        (2, {"plugin_sha256": "fe" * 32}, "`GRANIKV_PLUGIN=LIBRARY build_scripts/build_engines"),
        (2, {"tensorrt_version": "10.13.0.35"}, "`build_scripts/build_engines.sh CHECKPOINT OUT 2"),
        (2, {"compute_capability": "8.0"}, "`build_scripts/build_engines.sh CHECKPOINT OUT 2"),
    ):
        with pytest.raises(EngineMismatch) as caught:
            made.check(out, tp_size, facts(manifest, **changes))
        assert wanted in str(caught.value) and "granikv build" not in str(caught.value)
    lost = dataclasses.replace(made, ranks=(made.ranks[0], RankFiles()))
    with pytest.raises(EngineMismatch, match="rank 1: expected an engine.*build_engines.sh"):
        lost.check(out, 2, facts(manifest))


def test_engines_that_name_no_library_are_refused_where_there_is_one(built):
    """Those of a `granikv build` that recorded none."""
    out, manifest = built
    older = dataclasses.replace(manifest, plugin_sha256="")
    with pytest.raises(
        EngineMismatch, match="plugin library: expected .*abab.*got engines of none"
    ):
        older.check(out, 2, facts(manifest))


def test_engines_of_another_interface_than_the_package_are_refused(built):
    out, manifest = built
    other = dataclasses.replace(manifest, plugin_abi_hash="0" * 16)
    with pytest.raises(EngineMismatch, match="plugin interface.*got 0{16}.*granikv build"):
        other.check(out, 2, RuntimeFacts())


def test_another_tp_is_refused(built):
    out, manifest = built
    with pytest.raises(EngineMismatch, match="tp: expected 4, got engines for 2.*--tp 4"):
        manifest.check(out, 4, facts(manifest))


def test_heads_that_do_not_divide_are_refused(built):
    out, manifest = built
    model = dataclasses.replace(manifest.model, num_qo_heads=5, num_kv_heads=1)
    wrong = dataclasses.replace(manifest, model=model)
    with pytest.raises(InvalidArgument, match="num_qo_heads.*multiple of tp=2.*got 5"):
        wrong.check(out, 2, facts(manifest))


def test_a_missing_or_cut_rank_file_is_refused(built):
    out, manifest = built
    path = out / "rank1.engine"
    try:
        path.write_bytes(b"eng")
        with pytest.raises(EngineMismatch, match="rank1.engine.*expected a file of 6.*got 3 bytes"):
            manifest.check(out, 2, facts(manifest))
        path.unlink()
        with pytest.raises(EngineMismatch, match="rank1.engine.*got none.*granikv build"):
            manifest.check(out, 2, facts(manifest))
    finally:
        path.write_bytes(b"engine")
    fewer = dataclasses.replace(manifest, ranks=manifest.ranks[:1])
    with pytest.raises(EngineMismatch, match="ranks: expected 2, got 1"):
        fewer.check(out, 2, facts(manifest))


def test_a_build_that_stopped_at_onnx_has_no_engines(built):
    out, manifest = built
    ranks = tuple(dataclasses.replace(rank, engine=None) for rank in manifest.ranks)
    graphs = dataclasses.replace(manifest, ranks=ranks, builder="none")
    graphs.check(out, 2, RuntimeFacts(), "graph")
    with pytest.raises(EngineMismatch, match="expected an engine.*--builder none"):
        graphs.check(out, 2, RuntimeFacts())


def entry(name) -> dict:
    return {"name": name, "size_bytes": 1, "sha256": ""}


def test_unreadable_manifests_are_refused(built, tmp_path):
    out, _ = built
    with pytest.raises(ModelFileError, match="granikv build"):
        load_manifest(tmp_path)
    raw = json.loads((out / "manifest.json").read_text())
    for content, match in (
        ("{", "valid JSON"),
        ("[]", "format"),
        (json.dumps(raw | {"format": 2}), "format: expected 1, got 2"),
        (json.dumps({"format": 1}), "manifest of `granikv build`"),
        (json.dumps(raw | {"surprise": 1}), "surprise"),
        (json.dumps(raw | {"limits": {"max_requests": 0}}), "max_requests"),
        (json.dumps(raw | {"dtype": "int3"}), "dtype.*int3"),
        (json.dumps(raw | {"model": raw["model"] | {"num_kv_heads": 0}}), "num_kv_heads.*got 0"),
        (json.dumps(raw | {"model": raw["model"] | {"num_layers": "4"}}), "num_layers.*got '4'"),
        (json.dumps(raw | {"ranks": [{"engine": entry("/etc/passwd")}]}), "file.*/etc/passwd"),
        (json.dumps(raw | {"ranks": [{"engine": entry(5)}]}), "file.*got 5"),
        ("[" * 100000, "valid JSON"),
    ):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(ModelFileError, match=match):
            load_manifest(tmp_path)


def test_a_window_is_refused_where_it_would_be_ignored(tmp_path):
    model = make_tiny_hf(tmp_path / "model", "MistralForCausalLM", sliding_window=64)
    sizes = {"max_requests": 4, "max_tokens": 16, "capacity_tokens": 256, "builder": "none"}
    for max_seq_len in (0, 65):  # 0: the whole context
        wanted = BuildSettings(model, tmp_path / "out", max_seq_len=max_seq_len, **sizes)
        with pytest.raises(Unsupported, match="sliding_window=64.*max-seq"):
            build(wanted)
    made = build(BuildSettings(model, tmp_path / "out", max_seq_len=64, **sizes))
    assert load_manifest(tmp_path / "out") == made and made.model.sliding_window == 64
