"""Shapes of published models, for measurements with random weights."""

from __future__ import annotations

from pathlib import Path

from granikv.errors import InvalidArgument

FOLDER = Path(__file__).parent
SHORT = {"llama8b": "llama-3.1-8b", "qwen14b": "qwen2.5-14b", "qwen32b": "qwen2.5-32b"}


def find_shape(name: str) -> Path:
    """Folder with a config.json: a path, or the name of one that ships with the package."""
    for folder in (Path(name), FOLDER / SHORT.get(name.lower(), name.lower())):
        if (folder / "config.json").is_file():
            return folder
    known = [*sorted(p.parent.name for p in FOLDER.glob("*/config.json")), *SHORT]
    raise InvalidArgument("random_weights", name, f"a folder with config.json, or one of {known}")


def is_shape(name: str) -> bool:
    """Whether it is a shape of ours and no path."""
    known = {*SHORT, *(p.parent.name for p in FOLDER.glob("*/config.json"))}
    return name.lower() in known and not Path(name).exists()
