#!/bin/bash
# Builds libgranikv_trt.so into $PREFIX/lib, with the pinned Triton language, whatever the image has.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${PREFIX:?expected the folder of the installation}"
PYTHON=${PYTHON:-python3}
TRITON=3.6.0

if ! "$PYTHON" -c "import sys, triton; sys.exit(triton.__version__ != '$TRITON')" 2> /dev/null; then
  # torch is the image's; only the compiler of the kernels is another
  "$PYTHON" -m venv --system-site-packages "$PREFIX/build"
  PYTHON=$PREFIX/build/bin/python
  "$PYTHON" -m pip --disable-pip-version-check install -q "triton==$TRITON" "typer>=0.12" "rich>=13"
fi

"$PYTHON" build_scripts/build_plugin.py --out "$PREFIX/build/plugin" \
  --arch "${PLUGIN_ARCH:-90}" --models "${PLUGIN_MODELS:-llama-3.1-8b}" \
  --elements "${PLUGIN_ELEMENTS:-bf16}" --tp "${PLUGIN_TP:-all}"
mkdir -p "$PREFIX/lib"
mv "$PREFIX/build/plugin/libgranikv_trt.so" "$PREFIX/lib/"
rm -rf "$PREFIX/build"
