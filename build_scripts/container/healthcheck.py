"""Exit 0 when the server on the default HTTP port says that it is ready."""

import sys
import urllib.error
import urllib.request

URL = "http://127.0.0.1:8000/v2/health/ready"

try:
    with urllib.request.urlopen(URL, timeout=4) as answer:
        sys.exit(answer.status != 200)
except (urllib.error.URLError, OSError) as error:
    sys.exit(f"{URL}: {error}")
