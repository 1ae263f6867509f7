"""convert_checkpoint.py and build_engines.sh: the files, a second run, interruptions, errors."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from helpers import make_tiny_hf
from safetensors import safe_open
from safetensors.torch import load_file

from granikv.engines import trtllm_checkpoint, trtllm_manifest
from granikv.engines.build import ExportSettings
from granikv.engines.checkpoint import open_checkpoint
from granikv.engines.export import export_rank
from granikv.engines.io import BuildLimits, plugin_abi_hash
from granikv.engines.manifest import RuntimeFacts, load_manifest
from granikv.engines.sharding import Shard
from granikv.engines.trtllm_checkpoint import ARCHITECTURE, convert, parameter_name, read_ours
from granikv.engines.trtllm_manifest import write_manifest
from granikv.errors import EngineMismatch, InvalidArgument, ModelFileError

ROOT = Path(__file__).resolve().parents[2]
API = json.loads((Path(__file__).parent / "api.json").read_text())
ARCHS = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
LIMITS = BuildLimits(max_requests=4, max_tokens=16, max_seq_len=64, capacity_tokens=256)
OPTIONS = ["--max-batch", "4", "--max-tokens", "16", "--max-seq", "64", "--capacity", "256"]


def settings(path, out, tp_size=1, dtype="bfloat16"):
    return ExportSettings(path, out, tp_size, dtype, 4, 16, 64, 256)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rank_files_hold_the_onnx_routes_shards(tmp_path, arch, tp_size, dtype):
    """tp 4: each KV head on two ranks."""
    path = make_tiny_hf(tmp_path / "model", arch, vocab_size=98)
    config = convert(settings(path, tmp_path / "out", tp_size, dtype))
    checkpoint = open_checkpoint(path)
    for rank in range(tp_size):
        shard = Shard(checkpoint.config, tp_size, rank)
        export_rank(checkpoint, shard, LIMITS, dtype, tmp_path)
        graph = onnx.load(str(tmp_path / f"rank{rank}.onnx")).graph
        found = load_file(str(tmp_path / "out" / f"rank{rank}.safetensors"))
        expected = {
            parameter_name(x.name): onnx.numpy_helper.to_array(x)
            for x in graph.initializer
            if x.data_location == onnx.TensorProto.EXTERNAL or "." in x.name or x.name in WHOLE
        }
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            assert tuple(found[name].shape) == array.shape
            raw = found[name].contiguous().view(torch.uint8).numpy().reshape(-1)
            assert np.array_equal(raw, np.ascontiguousarray(array).view(np.uint8).reshape(-1)), name
    with safe_open(str(tmp_path / "out" / "rank0.safetensors"), "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert config["mapping"] == {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1}
    assert (config["architecture"], config["dtype"]) == (ARCHITECTURE, dtype)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    model, limits = read_ours(written["granikv"])
    assert (model, limits) == (checkpoint.config, LIMITS)
    assert written["granikv"]["plugin_abi_hash"] == plugin_abi_hash()


WHOLE = ("embedding", "lm_head", "final_norm", "rope_cos", "rope_sin")


def test_a_second_run_makes_only_what_is_missing(tmp_path):
    path, out = make_tiny_hf(tmp_path / "model"), tmp_path / "out"
    convert(settings(path, out, 2))
    files = [out / f"rank{rank}.safetensors" for rank in range(2)]
    times = [x.stat().st_mtime_ns for x in files]
    convert(settings(path, out, 2))
    assert [x.stat().st_mtime_ns for x in files] == times
    files[1].write_bytes(files[1].read_bytes()[:-1] + b"x")
    convert(settings(path, out, 2))
    assert files[0].stat().st_mtime_ns == times[0]
    assert files[1].stat().st_mtime_ns != times[1]
    convert(settings(path, out, 2, "float16"))
    assert files[0].stat().st_mtime_ns != times[0]
    assert load_file(str(files[0]))["transformer.vocab_embedding.weight"].dtype == torch.float16


def test_an_interrupted_run_leaves_no_config_and_no_half_file(tmp_path, monkeypatch):
    path, out = make_tiny_hf(tmp_path / "model"), tmp_path / "out"
    convert(settings(path, out, 2))
    real = trtllm_checkpoint.export.weight_blocks

    def broken(checkpoint, shard, limits, spec, kind):
        if shard.rank == 1 and spec.name == "layers.1.qkv":
            raise KeyboardInterrupt
        return real(checkpoint, shard, limits, spec, kind)

    monkeypatch.setattr(trtllm_checkpoint.export, "weight_blocks", broken)
    with pytest.raises(KeyboardInterrupt):
        convert(settings(path, out, 2, "float16"))
    assert not (out / "config.json").exists() and not list(out.glob("*.partial"))
    monkeypatch.undo()
    time = (out / "rank0.safetensors").stat().st_mtime_ns
    convert(settings(path, out, 2, "float16"))
    assert (out / "rank0.safetensors").stat().st_mtime_ns == time


def test_errors_come_before_anything_is_written(tmp_path):
    path, out = make_tiny_hf(tmp_path / "model"), tmp_path / "out"
    for changes, error, match in (
        ({"tp_size": 3}, InvalidArgument, "num_qo_heads.*tp=3"),
        ({"dtype": "int8"}, InvalidArgument, "dtype.*bfloat16"),
    ):
        with pytest.raises(error, match=match):
            convert(settings(path, out, **changes))
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match="truncated"):
        convert(settings(path, out))
    assert not out.exists()


MEASURE = """
import resource, sys
from pathlib import Path
from granikv.engines import trtllm_checkpoint
from granikv.engines.build import ExportSettings
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
trtllm_checkpoint.convert(ExportSettings(Path(sys.argv[1]), Path(sys.argv[2]), max_seq_len=64))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_model(tmp_path):
    """240 MB of weights (fp32 in the file), converted with less than half of that."""
    path = make_tiny_hf(
        tmp_path / "model", hidden_size=512, intermediate_size=2048, vocab_size=40_000,
        num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=8, head_dim=64,
    )  # fmt: skip
    assert (path / "model.safetensors").stat().st_size > 240e6
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), str(tmp_path / "out")],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    assert int(done.stdout) * 1024 < 120e6


STUB = """#!{python}
import json, os, sys
from pathlib import Path
given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
out = Path(given["--output_dir"])
config = json.loads((Path(given["--checkpoint_dir"]) / "config.json").read_text())
for rank in range(config["mapping"]["world_size"]):
    (out / f"rank{{rank}}.engine").write_bytes(b"engine %d" % rank)
(out / "config.json").write_text(json.dumps({{"version": "1.2.1", "pretrained_config": config}}))
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps([given, os.environ["GRANIKV_PLUGIN"], os.environ["PYTHONPATH"]]) + "\\n")
"""


@pytest.fixture
def shell(tmp_path):
    """Runs build_engines.sh; a stub of trtllm-build is on PATH and records its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    stub = folder / "trtllm-build"
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(0o755)
    (tmp_path / "plugin.so").write_bytes(b"plugin")
    environ = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(Path(__file__).parent / "standin"),
        "GRANIKV_PLUGIN": str(tmp_path / "plugin.so"),
        "COMPUTE_CAPABILITY": "9.0",
        "RECORD": str(tmp_path / "record"),
    }

    def run(*arguments, **changes):
        return subprocess.run(
            [str(ROOT / "build_scripts" / "build_engines.sh"), *map(str, arguments)],
            env=environ | changes, capture_output=True, text=True, cwd=tmp_path, timeout=240,
        )  # fmt: skip

    return run


def test_build_engines_converts_and_builds_each_setting(tmp_path, shell):
    path = make_tiny_hf(tmp_path / "model", "Qwen3ForCausalLM")
    done = shell(path, "out", "1", "2", "--", *OPTIONS, "--dtype", "float16")
    assert done.returncode == 0, done.stderr
    calls = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    table = API["trtllm_build_options"]
    for tp, (given, plugin, python_path) in zip((1, 2), calls, strict=True):
        assert given.keys() == {*table["options"], *table["plugin_options"]["options"]}
        folder = Path("out") / f"tp{tp}"
        assert given == {
            "--checkpoint_dir": str(folder / "checkpoint"),
            "--output_dir": str(folder / "engines"),
            "--model_cls_file": str(ROOT / "trtllm_plugin" / "trtllm_model.py"),
            "--model_cls_name": ARCHITECTURE,
            "--max_batch_size": "4",
            "--max_num_tokens": "16",
            "--max_seq_len": "64",
            "--max_beam_width": "1",
            "--gemm_plugin": "disable",
            "--workers": "1",
            "--output_timing_cache": str(folder / "engines" / "model.cache"),
        }
        assert plugin == str(tmp_path / "plugin.so")
        assert python_path.split(":")[0] == str(ROOT)
        engines = tmp_path / folder / "engines"
        manifest = load_manifest(engines)
        library = hashlib.sha256(b"plugin").hexdigest()
        manifest.check(engines, tp, RuntimeFacts("10.14.1.48", "9.0", library))
        assert (manifest.builder, manifest.dtype) == ("trtllm-build", "float16")
        assert manifest.versions == {"tensorrt_llm": "1.2.1"} and manifest.limits == LIMITS
        with pytest.raises(EngineMismatch, match="TensorRT: expected 10.15"):
            manifest.check(engines, tp, RuntimeFacts("10.15", "9.0"))
    assert done.stdout.splitlines() == [f"tp {tp}: out/tp{tp}/engines" for tp in (1, 2)]


def test_a_failed_build_ends_the_script(tmp_path, shell):
    path = make_tiny_hf(tmp_path / "model")
    (tmp_path / "bin" / "trtllm-build").write_text("#!/bin/bash\nexit 3\n")
    done = shell(path, "out", "1", "2", "--", *OPTIONS)
    assert done.returncode == 3 and not (tmp_path / "out" / "tp2").exists()
    done = shell(path, "out", "3", "--", *OPTIONS)
    assert done.returncode == 2 and "num_qo_heads" in done.stderr


@pytest.mark.parametrize(
    "arguments,changes,match",
    [
        (["model", "out"], {}, "expected CHECKPOINT OUT TP"),
        (["model", "out", "two"], {}, "TP: expected a number of ranks, got 'two'"),
        (["model", "out", "--"], {}, "TP: expected at least one"),
        (["nowhere", "out", "1"], {}, "CHECKPOINT: expected.*nowhere"),
        (["model", "out", "1"], {"PATH": "/usr/bin:/bin"},
         "trtllm-build: expected TensorRT-LLM 1.2.x on PATH.*granikv build"),
        (["model", "out", "1"], {"GRANIKV_PLUGIN": "none.so"}, "GRANIKV_PLUGIN.*none.so"),
        (["model", "out", "1"], {"COMPUTE_CAPABILITY": "90"},
         "COMPUTE_CAPABILITY: expected one like 9.0, got '90'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_is_made(tmp_path, shell, arguments, changes, match):
    import re

    (tmp_path / "model").mkdir()
    done = shell(*arguments, **changes)
    assert done.returncode == 2 and re.search(match, done.stderr), done.stderr
    assert not (tmp_path / "out").exists()


def test_a_manifest_is_not_written_for_other_engines(tmp_path):
    path = make_tiny_hf(tmp_path / "model")
    config = convert(settings(path, tmp_path / "out", 2))
    with pytest.raises(InvalidArgument, match="compute_capability.*like 9.0.*got '90'"):
        write_manifest(tmp_path / "out", tmp_path, tmp_path / "plugin.so", "10.14.1", "90")
    engines = tmp_path / "engines"
    engines.mkdir()
    arguments = (tmp_path / "out", engines, tmp_path / "plugin.so", "10.14.1", "9.0")
    with pytest.raises(ModelFileError, match="config.json"):
        write_manifest(*arguments)
    other = {"pretrained_config": {"architecture": "LlamaForCausalLM"}}
    (engines / "config.json").write_text(json.dumps(other))
    with pytest.raises(EngineMismatch, match="LlamaForCausalLM.*run trtllm-build"):
        write_manifest(*arguments)
    (engines / "config.json").write_text(json.dumps({"pretrained_config": config}))
    (engines / "rank0.engine").write_bytes(b"x")
    with pytest.raises(ModelFileError, match="rank1.engine.*no file"):
        write_manifest(*arguments)
    (engines / "rank1.engine").write_bytes(b"x")
    with pytest.raises(ModelFileError, match="plugin.so: expected the plugin library"):
        write_manifest(*arguments)
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(EngineMismatch, match="granikv: expected.*convert_checkpoint.py, got none"):
        write_manifest(*arguments)
    assert not (engines / "manifest.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a", "b"], "expected 3 or 4 arguments, got 2"),
        (["a", "b", "c"], "compute capability: expected a GPU"),
        (["a", "b", "c", "9.0"], "tensorrt: expected what built the engines"),
    ],
)
def test_a_manifest_that_cannot_be_written_is_one_line(arguments, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setattr(trtllm_manifest.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        trtllm_manifest.main(arguments)
    assert words in str(ended.value)
