"""What can be known before a server is started: its settings, and the engine's without weights.

The stub reads the same settings with the same code, but its errors are in the server's log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from granikv import env
from granikv.config import EngineConfig
from granikv.errors import InvalidArgument
from granikv.outputs import check_output_file
from granikv.serving.settings import DEFAULT_ENGINE_CLASS, default_python, read_settings

PROBE = "ready?"  # the launcher's own request
PARAMETER = re.compile(
    r'^\s*parameters\s*\{\s*key:\s*"(\w+)"\s*value:?\s*\{\s*string_value:\s*("(?:[^"\\]|\\.)*")',
    re.MULTILINE,
)


def check_server(
    model_repository: Path, environ: Mapping[str, str], log_path: Path | None = None
) -> None:
    """environ: of the server. Raises what loading the model would raise, without its weights."""
    for name in env.VARIABLES:
        env.read(name, environ)
    settings = read_settings(read_parameters(model_repository), environ)
    if log_path is not None:
        check_output_file("log", log_path)
    if settings.engine_class != DEFAULT_ENGINE_CLASS or settings.python != default_python():
        return  # another engine, or packages that only another interpreter has
    from granikv.config_check import check_engine, check_served_model

    config, model = check_engine(EngineConfig(**settings.engine_config))
    check_served_model(config, model, PROBE)


def read_parameters(model_repository: Path) -> dict[str, str]:
    """Those of the model's config.pbtxt. Raises InvalidArgument when there is none."""
    path = model_repository / "granikv" / "config.pbtxt"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        expected = f"a folder with granikv/config.pbtxt ({error})"
        raise InvalidArgument("model_repository", str(model_repository), expected) from None
    return {name: json.loads(value) for name, value in PARAMETER.findall(text)}
