"""Prints the source files that are longer than the project wants.

A file over its limit is printed; one more than a tenth over it fails the check.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 400  # lines of Python
LIMITS = {"model_repository/*/1/model.py": 150}
FOLDERS = ("granikv", "model_repository", "tests", "build_scripts", "trtllm_plugin")
SKIPPED = {"__pycache__", ".venv", "build"}


def limit_of(path: Path) -> int:
    """Lines that `path`, relative to the root, may have."""
    for pattern, limit in LIMITS.items():
        if path.match(pattern):
            return limit
    return LIMIT


def oversized(root: Path = ROOT) -> list[tuple[Path, int, int]]:
    """(path relative to root, lines, limit) of every file over its limit, longest first."""
    found = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            relative = path.relative_to(root)
            if SKIPPED.intersection(relative.parts):
                continue
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > limit_of(relative):
                found.append((relative, lines, limit_of(relative)))
    return sorted(found, key=lambda entry: -entry[1])


def main() -> int:
    files = oversized()
    for path, lines, limit in files:
        print(f"{path}: {lines} lines, limit {limit}")
    return int(any(lines > limit * 1.1 for _, lines, limit in files))


if __name__ == "__main__":
    sys.exit(main())
