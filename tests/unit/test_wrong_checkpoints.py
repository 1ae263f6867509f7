"""Hugging Face folders whose files hold something else than they should: one line names the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from granikv.engines.checkpoint import open_checkpoint
from granikv.errors import ModelFileError, Unsupported
from granikv.models.weights import read_hf_config, shard_paths
from tests.helpers import make_tiny_hf

NOT_A_NUMBER = float("nan")
WRONG: tuple = (-1, 0, 1.5, "x", [], ["x"], {}, {"x": 1}, True, 2**70, NOT_A_NUMBER, None)
DEEP = b"[" * 200_000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def change(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_config_of_other_types_is_refused_or_read(tiny, folder):
    file = folder / "config.json"
    original = json.loads(file.read_text())
    for key in (*original, "rope_scaling", "quantization_config", "sliding_window"):
        for value in WRONG:
            file.write_text(json.dumps(original | {key: value}))
            try:
                read_hf_config(folder)
            except (ModelFileError, Unsupported) as error:
                assert str(file) in str(error) or "rope scaling" in str(error)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"rms_norm_eps": NOT_A_NUMBER}, "rms_norm_eps: expected a number above 0, got nan"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: expected a number above 0, got '1e-5'"),
        ({"architectures": 3}, "architecture: expected one of Llama.*got 3"),
        ({"rope_parameters": "x"}, "expected a decoder's configuration"),
        ({"rope_parameters": {"rope_type": "linear"}}, "expected the key 'factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope_parameters.*finite"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta: expected a number above 0"),
    ],
)
def test_what_the_numbers_come_from_is_checked(folder, values, match):
    change(folder / "config.json", **values)
    with pytest.raises(ModelFileError, match=match):
        read_hf_config(folder)


@pytest.mark.parametrize("value", ["x", [None], 1.5, {}])
def test_ids_that_end_an_answer_are_integers(folder, value):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelFileError, match="eos_token_ids: expected integers"):
        read_hf_config(folder)


@pytest.mark.parametrize(
    "value", [None, 5, "x", {"a": 5}, {"a": None}, {"a": ["x"]}, {"a": "../x"}, {"a": "b", "c": 5}]
)
def test_an_index_names_files_beside_it(folder, value):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": value}))
    with pytest.raises(ModelFileError, match="weight_map: expected names of files beside it"):
        shard_paths(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_deep_json_is_refused(folder, name):
    (folder / name).write_bytes(DEEP)
    with pytest.raises(ModelFileError, match=f"{name}: expected valid JSON"):
        read_hf_config(folder)


@pytest.mark.parametrize("what", ["deep", "offsets"])
def test_a_header_of_other_types_is_refused(folder, what):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [float(x) for x in entry["data_offsets"]]
    text = DEEP if what == "deep" else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(ModelFileError, match=r"model\.safetensors: expected a complete"):
        open_checkpoint(folder)
