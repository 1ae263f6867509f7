# `make` lists the targets. `make demo` is all that a fresh machine needs.
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
# pip shows its progress where somebody looks
PIP := $(PY) -m pip --disable-pip-version-check install $(if $(MAKE_TERMOUT),,-q)
CONSTRAINTS := build_scripts/constraints-cpu.txt
# compat: a path entry; a clone named granikv would hide the other kind from its parent folder
PACKAGES = $(PIP) --config-settings editable_mode=compat -c $(CONSTRAINTS) "numpy==1.26.4" "$(TORCH)" $(PIP_OPTIONS)

.DEFAULT_GOAL := help
.PHONY: help setup dev demo serve test lint typecheck clean

help:       ## this list
	@sed -nE 's/^([a-z]+):[^#]*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

setup: $(VENV)/.ok   ## .venv with Triton, torch and the embedded model: for demo, serve, bench
dev: $(VENV)/.dev    ## also what tests, linters and `granikv build` need

# Triton's Python stub loads libpython, so the interpreter must have been built shared.
$(VENV)/.ok: pyproject.toml $(CONSTRAINTS) build_scripts/find_python.sh
	@echo "setup 1/5: virtual environment $(VENV)"
	@test -x $(PY) || "$$(build_scripts/find_python.sh)" -m venv $(VENV)
	@echo "setup 2/5: installing $(TORCH) (about 200 MB for CPUs, several GB with CUDA)"
	@$(PIP) "numpy==1.26.4" "$(TORCH)" $(PIP_OPTIONS)
	@echo "setup 3/5: installing granikv and what it uses: transformers, Triton's client, ... (100 MB)"
	@$(PACKAGES) -e ".[serve,bench]"
	@echo "setup 4/5: installing the Triton server, from nvidia-pytriton (55 MB)"
	@$(PIP) --no-deps "nvidia-pytriton==0.7.0"
	@echo "setup 5/5: looking for the embedded model (98 MB), and fetching it if it is nowhere"
	@$(PY) -c "import sys; from granikv.models.embedded import main; sys.exit(main())"
	@touch $@

$(VENV)/.dev: $(VENV)/.ok
	@echo "dev 1/2: installing pytest, linters, onnx, ..."
	@$(PACKAGES) -e ".[serve,bench,engines,test,dev]"
	@echo "dev 2/2: installing $(TRITON), the kernels' compiler, unless torch brought it"
	@$(PY) -c "import triton" 2>/dev/null || $(PIP) "$(TRITON)"
	@touch $@

# TensorRT-RTX, whose builder makes engines without a GPU; without it tests are skipped and say so.
$(VENV)/.plugin: $(VENV)/.dev
	@echo "installing TensorRT-RTX (109 MB) for tests that build engines"
	@$(PIP) --config-settings editable_mode=compat -c $(CONSTRAINTS) -e ".[plugin]" $(PIP_OPTIONS) \
		|| echo "TensorRT-RTX cannot be installed here: tests of engines will be skipped"
	@touch $@

ifneq ($(filter-out full short,$(DEMO)),)
$(error DEMO: expected full or short, got $(DEMO))
endif

demo: $(VENV)/.ok    ## the multi-agent demo over a real Triton server (DEMO=short: fewer agents)
	$(PY) -m granikv.cli demo $(if $(filter short,$(DEMO)),--short)

serve: $(VENV)/.ok   ## the server in the foreground: HTTP 8000, gRPC 8001 (SERVE_OPTIONS=...)
	$(PY) -m granikv.cli serve $(SERVE_OPTIONS)

test: $(VENV)/.dev $(VENV)/.plugin   ## all tests; the last line is pytest's
	$(PY) -m pytest tests -q -rs

lint: $(VENV)/.dev   ## ruff, clang-format, file sizes
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) build_scripts/check_sizes.py
	$(VENV)/bin/clang-format --dry-run -Werror trtllm_plugin/*/*.cpp trtllm_plugin/*/*.h

typecheck: $(VENV)/.dev   ## mypy
	$(VENV)/bin/mypy granikv

clean:      ## remove .venv, out and caches
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
