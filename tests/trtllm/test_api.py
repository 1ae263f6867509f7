"""The stand-ins against the table of names and signatures, and our files against the table."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent
API = json.loads((HERE / "api.json").read_text())
MODEL_FILE = HERE.parents[1] / "trtllm_plugin" / "trtllm_model.py"
NAMES = {(entry["module"], entry["name"]) for entry in API["names"]}


class _Default:
    """A default as the table writes it."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return str(self.value) if isinstance(self.value, enum.Enum) else repr(self.value)


def bare(found) -> str:
    """Names, kinds and defaults of a callable's parameters."""
    parameters = []
    for parameter in inspect.signature(found).parameters.values():
        default = parameter.default
        if default is not inspect.Parameter.empty:
            default = _Default(default)
        parameters.append(parameter.replace(annotation=inspect.Parameter.empty, default=default))
    return str(inspect.Signature(parameters))


@pytest.mark.parametrize("entry", API["names"], ids=lambda e: f"{e['module']}.{e['name']}")
def test_stand_ins_have_the_tables_signatures(trtllm, entry):
    module = importlib.import_module(entry["module"])
    owner, _, name = entry["name"].rpartition(".")
    found = getattr(getattr(module, owner) if owner else module, name)
    if entry["signature"] is not None:
        assert bare(found) == entry["signature"]


def test_every_entry_has_a_source():
    files = {entry["file"]: entry for entry in API["files"]}
    used = {entry["file"] for entry in API["names"]}
    used |= {API[key]["file"] for key in ("prepare_inputs_keywords", "trtllm_build_options")}
    assert used <= files.keys()
    for entry in files.values():
        assert (entry["commit"] and len(entry["commit"]) == 40) or entry["note"]


def test_the_model_file_uses_nothing_else():
    tree = ast.parse(MODEL_FILE.read_text())
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tensorrt"):
            used |= {(node.module, alias.name) for alias in node.names}
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("trt."):
            used.add(("tensorrt", ast.unparse(node)[len("trt.") :]))
    prefixes = {(m, n.partition(".")[0]) for m, n in NAMES if m == "tensorrt"}
    assert used and used - NAMES - prefixes == set()


def test_stand_ins_have_no_public_method_that_the_table_lacks(trtllm):
    for module, name in (("tensorrt_llm.functional", "Tensor"), ("tensorrt", "INetworkDefinition")):
        found = getattr(importlib.import_module(module), name)
        public = {x for x in vars(found) if not x.startswith("_")}
        assert {(module, f"{name}.{x}") for x in public} <= NAMES
