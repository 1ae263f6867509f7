"""The table of environment variables: parsing, and that nothing goes around it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from granikv import env
from granikv.errors import InvalidArgument
from granikv.serving.settings import read_settings

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_and_values(tmp_path):
    assert env.read("GRANIKV_LOG_PLAN", {}) is False
    assert env.read("GRANIKV_LOG_PLAN", {"GRANIKV_LOG_PLAN": ""}) is False
    assert env.read("GRANIKV_LOG_PLAN", {"GRANIKV_LOG_PLAN": "1"}) is True
    assert env.read("GRANIKV_MODEL_DIR", {"GRANIKV_MODEL_DIR": str(tmp_path)}) == tmp_path
    assert env.read("GRANIKV_ENGINE_CONFIG", {"GRANIKV_ENGINE_CONFIG": '{"a": 1}'}) == {"a": 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GRANIKV_LOG_PLAN", "yes please"),
        ("GRANIKV_ENGINE_CONFIG", "{"),
        ("GRANIKV_ENGINE_CONFIG", "[1]"),
        ("GRANIKV_ENGINE_CLASS", "module.Class"),
        ("GRANIKV_PYTHON", "/nowhere/python"),
        ("GRANIKV_MODEL_DIR", "/nowhere"),
    ],
)
def test_a_value_that_cannot_be_parsed_is_named(name, value):
    with pytest.raises(InvalidArgument) as caught:
        env.read(name, {name: value})
    assert name in str(caught.value) and value in str(caught.value)


def test_settings_read_the_table(tmp_path):
    environ = {
        "GRANIKV_RUN_DIR": str(tmp_path),
        "GRANIKV_ENGINE_CONFIG": '{"max_requests": 3}',
        "GRANIKV_ENGINE_CLASS": "a:B",
    }
    settings = read_settings({"engine_config": '{"max_requests": 9, "async_depth": 0}'}, environ)
    assert settings.engine_config == {"max_requests": 3, "async_depth": 0}
    assert settings.engine_class == "a:B"
    with pytest.raises(InvalidArgument, match="GRANIKV_ENGINE_CONFIG: name: .*got 'no_such_field'"):
        read_settings(
            {}, {"GRANIKV_RUN_DIR": str(tmp_path), "GRANIKV_ENGINE_CONFIG": '{"no_such_field": 3}'}
        )


def test_a_default_is_the_readers_own():
    env.read("GRANIKV_ENGINE_CONFIG", {})["dtype"] = "int3"
    assert env.read("GRANIKV_ENGINE_CONFIG", {}) == {}


def test_unknown_names_are_found():
    assert env.unknown({"GRANIKV_LOGPLAN": "1", "GRANIKV_LOG_PLAN": "1"}) == ["GRANIKV_LOGPLAN"]


def test_set_variables_are_told_from_defaults():
    unset = env.describe({"GRANIKV_NATIVE": ""})
    assert set(unset) == set(env.VARIABLES)
    assert unset["GRANIKV_NATIVE"] == "default (True)" and unset["GRANIKV_PYTHON"] == "not set"
    assert unset["GRANIKV_LOG_PLAN"] == "default (False)"
    assert env.describe({"GRANIKV_NATIVE": "1"})["GRANIKV_NATIVE"] == "True"
    with pytest.raises(InvalidArgument):
        env.describe({"GRANIKV_NATIVE": "perhaps"})


def test_every_variable_is_documented():
    text = (ROOT / "README.md").read_text()
    for name in env.VARIABLES:
        assert f"| `{name}` |" in text, name


def looked_up(tree: ast.AST):
    """What is looked up one by one in os.environ or by os.getenv, as source text."""
    for node in ast.walk(tree):
        source = ast.unparse(node)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            yield ast.unparse(node.slice)
        if isinstance(node, ast.Call) and source.startswith(
            ("os.environ.", "environ.", "os.getenv(", "getenv(")
        ):
            yield ast.unparse(node.args[0]) if node.args else source


def test_no_other_module_looks_up_our_variables():
    files = [*(ROOT / "granikv").rglob("*.py"), *(ROOT / "model_repository").rglob("*.py")]
    assert len(files) > 40
    for path in files:
        if path == ROOT / "granikv" / "env.py":
            continue
        for name in looked_up(ast.parse(path.read_text())):
            is_foreign = name[:1] in "'\"" and not name.strip("'\"").startswith(env.PREFIX)
            assert is_foreign, f"{path.relative_to(ROOT)} looks up {name}: add it to env.py"
