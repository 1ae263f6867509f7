#!/bin/bash
# Prints a Python 3.11 or 3.12 that was built with a shared libpython (Triton's stub loads it).
set -eu
for name in ${PYTHON:-} python3.11 python3.12 python3; do
  command -v "$name" >/dev/null 2>&1 || continue
  "$name" - <<'PY' 2>/dev/null || continue
import sys
import sysconfig
import venv

supported = sys.version_info[:2] in ((3, 11), (3, 12))
if not (supported and sysconfig.get_config_var("Py_ENABLE_SHARED")):
    sys.exit(1)
print(sys.executable)
PY
  exit 0
done
echo "find_python: expected Python 3.11 or 3.12 with a shared libpython (and venv) on PATH;" \
  "install one, or name it with PYTHON=..." >&2
exit 1
