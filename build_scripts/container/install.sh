#!/bin/bash
# Installs the package beside what the image has: nothing that is there is replaced.
# SITE: a folder to install into instead of the interpreter's own.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${PREFIX:?expected the folder of the installation}"
PYTHON=${PYTHON:-python3}
PIP=("$PYTHON" -m pip --disable-pip-version-check install -q --no-cache-dir)
TARGET=()
[ -z "${SITE:-}" ] || TARGET=(--target "$SITE")

"$PYTHON" -m pip freeze --exclude-editable > "$PREFIX.freeze" 2> /dev/null
mapfile -t MISSING < <("$PYTHON" build_scripts/container/missing.py pyproject.toml)
if [ "${#MISSING[@]}" -gt 0 ]; then
  "${PIP[@]}" "${TARGET[@]}" --constraint "$PREFIX.freeze" "${MISSING[@]}"
fi
rm "$PREFIX.freeze"
"${PIP[@]}" "${TARGET[@]}" --no-deps .

mkdir -p "$PREFIX"
cp -r plugin/lib "$PREFIX/"
cp -r model_repository build_scripts/container/healthcheck.py "$PREFIX/"
