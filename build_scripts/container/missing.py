"""Prints the requirements of a pyproject.toml that this interpreter does not meet, one per line.

Beside the package's own: what the launcher needs to prove that the server answers.
"""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

LAUNCHER = ("tritonclient[grpc,http]", "psutil>=5.9")


def is_met(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def main() -> None:
    project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    for text in (*project["dependencies"], *LAUNCHER):
        if not is_met(Requirement(text)):
            print(text)


if __name__ == "__main__":
    main()
