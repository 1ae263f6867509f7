"""Environment variables that GraniKV reads: this table is all of them.

Each starts with GRANIKV_. A value that cannot be parsed is an error that names the variable; an
empty value counts as not set. Other modules call `read`, none looks up a GRANIKV_ name itself.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from granikv.errors import InvalidArgument

PREFIX = "GRANIKV_"


def _flag(text: str) -> bool:
    values = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in values:
        raise ValueError
    return values[text.lower()]


def _json_object(text: str) -> dict:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def _class_path(text: str) -> str:
    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError
    return text


def _executable(text: str) -> str:
    if not os.access(text, os.X_OK) or Path(text).is_dir():
        raise ValueError
    return text


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise ValueError
    return Path(text)


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise ValueError
    return Path(text)


@dataclass(frozen=True)
class Variable:
    """expected: what a value must be, for the documents and for the error's text."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    expected: str
    effect: str


VARIABLES: dict[str, Variable] = {
    variable.name: variable
    for variable in (
        Variable(
            "GRANIKV_ENGINE_CONFIG", _json_object, {}, "a JSON object",
            "fields of EngineConfig; they override those of config.pbtxt one by one",
        ),
        Variable(
            "GRANIKV_ENGINE_CLASS", _class_path, None, "'module:Class'",
            "the engine that the engine process runs; granikv.engine:Engine if not set",
        ),
        Variable(
            "GRANIKV_PYTHON", _executable, None, "an executable file",
            "interpreter of the engine process; the environment's python3 if not set",
        ),
        Variable(
            "GRANIKV_RUN_DIR", Path, None, "a path",
            "folder of sockets and pid files of one server, made if missing; a temporary one if not set",
        ),
        Variable(
            "GRANIKV_LAUNCHER_LOCK", Path, None, "a path",
            "set by the launcher for its server, which ends when nobody keeps that file locked",
        ),
        Variable(
            "GRANIKV_MODEL_DIR", _folder, None, "a folder that exists",
            "where the embedded model's file is; its cache and package are searched if not set",
        ),
        Variable(
            "GRANIKV_PLUGIN", _file, None, "a file that exists",
            "the plugin library, for trtllm_model.py under trtllm-build; nothing else reads it",
        ),
        Variable(
            "GRANIKV_LOG_PLAN", _flag, False, "0 or 1",
            "1: every step's attention choices and their reasons on stderr of the engine",
        ),
        Variable(
            "GRANIKV_NATIVE", _flag, True, "0 or 1",
            "0: torch alone attends on the CPU, the compiled kernel is neither built nor used",
        ),
        Variable(
            "GRANIKV_GLUON", _flag, True, "0 or 1",
            "0: the Torch executor's attention runs the portable kernels alone, also where a "
            "Gluon one is faster",
        ),
    )
}  # fmt: skip


def read(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """The parsed value, or the default. Raises InvalidArgument naming variable and value.

    environ: os.environ if None. Raises KeyError for a name that is not in VARIABLES.
    """
    variable = VARIABLES[name]
    text = (os.environ if environ is None else environ).get(name, "")
    if not text:
        return copy.copy(variable.default)  # callers add to it
    try:
        return variable.parse(text)
    except ValueError as error:
        detail = f" ({error})" if str(error) else ""
        raise InvalidArgument(name, text, variable.expected + detail) from None


def unknown(environ: Mapping[str, str] | None = None) -> list[str]:
    """GRANIKV_ names that are set and mean nothing: most likely misspelt."""
    names = os.environ if environ is None else environ
    return sorted(n for n in names if n.startswith(PREFIX) and n not in VARIABLES)


def describe(environ: Mapping[str, str] | None = None) -> dict[str, object]:
    """Every variable with its value, or with what holds when it is not set. Raises as `read`."""
    names = os.environ if environ is None else environ
    facts: dict[str, object] = {}
    for name, variable in VARIABLES.items():
        value = str(read(name, names))
        if not names.get(name):
            value = f"default ({value})" if isinstance(variable.default, bool) else "not set"
        facts[name] = value
    return facts
