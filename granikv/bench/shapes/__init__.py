"""Shapes of published models, for measurements with random weights."""

from __future__ import annotations

from pathlib import Path

from granikv.errors import InvalidArgument

FOLDER = Path(__file__).parent


def find_shape(name: str) -> Path:
    """Folder with a config.json: a path, or the name of one that ships with the package."""
    for folder in (Path(name), FOLDER / name.lower()):
        if (folder / "config.json").is_file():
            return folder
    known = sorted(p.parent.name for p in FOLDER.glob("*/config.json"))
    raise InvalidArgument("random_weights", name, f"a folder with config.json, or one of {known}")
