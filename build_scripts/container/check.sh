#!/bin/bash
# Refuses an image whose parts do not fit: imports, command, model repository, plugin.
set -euo pipefail
: "${PREFIX:?expected the folder of the installation}"
PYTHON=${PYTHON:-python3}
cd / # the sources must not be what is imported

PYTHONPATH=${SITE:-} "$PYTHON" -m granikv.cli --help > /dev/null
test -f "$PREFIX/model_repository/granikv/config.pbtxt"
PYTHONPATH=${SITE:-} "$PYTHON" - "$PREFIX" "${SITE:-}" << 'EOF'
import ctypes
import sys
from pathlib import Path

import granikv

prefix, site = sys.argv[1:]
home = Path(granikv.__file__).resolve()
if site and Path(site).resolve() not in home.parents:
    sys.exit(f"granikv: expected in {site}, got {home}")
library = ctypes.CDLL(f"{prefix}/lib/libgranikv_trt.so")
for name in ("granikvCheckTable", "granikvBuildSummary"):
    getattr(library, name).restype = ctypes.c_char_p
wrong = library.granikvCheckTable().decode()
if wrong:
    sys.exit(f"libgranikv_trt.so: {wrong}")
print(f"granikv {home.parent}\n{library.granikvBuildSummary().decode()}")
EOF
