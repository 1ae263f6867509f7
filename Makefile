# GraniKV: set-up, demo, server and tests. `make demo` is all a fresh machine needs.
#
#   make demo [DEMO=short]   the multi-agent demo over a real Triton server
#   make serve               the same set-up, server in the foreground (HTTP 8000, gRPC 8001)
#   make test                all tests; the last line is pytest's
#   make lint typecheck clean
#
# TORCH chooses the build of torch. pip's own settings (index options, proxies) are used as they
# are; PIP_OPTIONS adds options to the installation of torch only.

SHELL := /bin/bash
.DELETE_ON_ERROR:

TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
PIP_OPTIONS ?=
DEMO ?= full
SERVE_OPTIONS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install -q
CONSTRAINTS := build_scripts/constraints-cpu.txt

.PHONY: setup demo serve test lint typecheck clean

setup: $(VENV)/.ok

# Triton's Python stub loads libpython, so the interpreter must have been built shared.
$(VENV)/.ok: pyproject.toml $(CONSTRAINTS) build_scripts/find_python.sh
	test -x $(PY) || "$$(build_scripts/find_python.sh)" -m venv $(VENV)
	$(PIP) "numpy==1.26.4" "$(TORCH)" $(PIP_OPTIONS)
	$(PIP) -c $(CONSTRAINTS) "numpy==1.26.4" "$(TORCH)" accelerate -e ".[serve,bench,engines,test,dev]" $(PIP_OPTIONS)
	$(PY) -c "import triton" 2>/dev/null || $(PIP) "$(TRITON)"
	$(PIP) --no-deps "nvidia-pytriton==0.7.0"
	$(PY) -c "import sys; from granikv.models.embedded import main; sys.exit(main())"
	touch $@

# TensorRT-RTX for two tests of the plugin (109 MB); without it they are skipped and say so.
$(VENV)/.plugin: $(VENV)/.ok
	$(PIP) -c $(CONSTRAINTS) -e ".[plugin]" $(PIP_OPTIONS) \
		|| echo "TensorRT-RTX cannot be installed here: two plugin tests will be skipped"
	touch $@

demo: $(VENV)/.ok
	$(PY) -m granikv.cli demo $(if $(filter short,$(DEMO)),--short)

serve: $(VENV)/.ok
	$(PY) -m granikv.cli serve $(SERVE_OPTIONS)

test: $(VENV)/.ok $(VENV)/.plugin
	$(PY) -m pytest tests -q

lint: $(VENV)/.ok
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) build_scripts/check_sizes.py
	$(VENV)/bin/clang-format --dry-run -Werror trtllm_plugin/*/*.cpp trtllm_plugin/*/*.h

typecheck: $(VENV)/.ok
	$(VENV)/bin/mypy granikv

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
