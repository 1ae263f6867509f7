"""Settings of the serving part: model parameters of config.pbtxt, overridden by the environment.

The variables are those of granikv/env.py. An unknown field or an unreadable value is an error when
the model loads.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from granikv import env
from granikv.config import EngineConfig
from granikv.errors import InvalidArgument
from granikv.serving.placement import visible_devices

JSON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
}
DEFAULT_ENGINE_CLASS = "granikv.engine:Engine"


@dataclasses.dataclass(frozen=True)
class ServingSettings:
    engine_config: dict
    engine_class: str = DEFAULT_ENGINE_CLASS
    python: str = ""
    run_dir: str = ""
    exclude_input_in_output: bool = False  # when a request does not say
    start_timeout_s: float = 900.0
    step_limit_s: float = 300.0  # a step older than this counts as a hung engine
    devices: str = ""  # CUDA_VISIBLE_DEVICES of the engine's process; "": as it is
    drain_s: float = 5.0  # running requests may finish within this after SIGTERM


def parse_engine_config(text: str, source: str) -> dict:
    """Engine fields from a JSON object. Raises InvalidArgument naming the source and field."""
    try:
        fields = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise InvalidArgument(source, text, f"a JSON object ({error})") from None
    if not isinstance(fields, dict):
        raise InvalidArgument(source, text, "a JSON object")
    return check_engine_fields(fields, source)


def check_engine_fields(fields: dict, source: str) -> dict:
    """`fields` itself. Raises InvalidArgument for one that EngineConfig does not have."""
    known = {f.name: str(f.type) for f in dataclasses.fields(EngineConfig)}
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"{near[0]!r}, or another" if near else "one"
            raise InvalidArgument(f"{source}: name", name, f"{hint} of {sorted(known)}")
        expected = known[name].partition(" ")[0]  # "str | None": a string
        value, types = fields[name], JSON_TYPES[expected]
        if value is None and "None" in known[name]:
            continue
        if not isinstance(value, types) or isinstance(value, bool) != (expected == "bool"):
            raise InvalidArgument(f"{source}: {name}", value, f"a value of type {expected}")
    return fields


def parse_assignments(assignments: list[str]) -> dict:
    """`key=value` pairs; a value that is JSON counts as such, anything else is a string.

    Raises InvalidArgument for an unknown field or a value that EngineConfig refuses.
    """
    fields = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise InvalidArgument("--set", assignment, "key=value")
        try:
            fields[name] = json.loads(value)
        except json.JSONDecodeError:
            fields[name] = value
    fields = check_engine_fields(fields, "--set")
    EngineConfig(**fields)
    return fields


def default_python() -> str:
    """The environment's interpreter; inside Triton's stub sys.executable is the stub itself."""
    python = Path(sys.prefix) / "bin" / "python3"
    return str(python) if python.exists() else sys.executable


def read_settings(
    parameters: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> ServingSettings:
    """parameters: those of config.pbtxt, by name; environ: os.environ if None.

    Raises InvalidArgument."""
    fields = parse_engine_config(parameters.get("engine_config", ""), "engine_config")
    variable = "GRANIKV_ENGINE_CONFIG"
    fields |= check_engine_fields(env.read(variable, environ), variable)
    EngineConfig(**fields)
    numbers = {}
    for name in ("start_timeout_s", "step_limit_s", "drain_s"):
        if name in parameters:
            try:
                numbers[name] = float(parameters[name])
            except ValueError:
                raise InvalidArgument(name, parameters[name], "a number of seconds") from None
            if not 0 <= numbers[name] < math.inf:
                raise InvalidArgument(name, parameters[name], "0 or more seconds")
    exclude = parameters.get("exclude_input_in_output", "false").lower()
    if exclude not in ("true", "false"):
        raise InvalidArgument("exclude_input_in_output", exclude, "'true' or 'false'")
    chosen_class = env.read("GRANIKV_ENGINE_CLASS", environ) or parameters.get("engine_class")
    return ServingSettings(
        engine_config=fields,
        engine_class=chosen_class or DEFAULT_ENGINE_CLASS,
        python=env.read("GRANIKV_PYTHON", environ) or default_python(),
        run_dir=str(env.read("GRANIKV_RUN_DIR", environ) or tempfile.mkdtemp(prefix="granikv_")),
        exclude_input_in_output=exclude == "true",
        devices=visible_devices(parameters.get("devices", ""), fields, environ),
        **numbers,
    )
