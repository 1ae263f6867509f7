"""Text in, text out: validates and hands requests to the engine process; see triton_adapter.py."""

import json
import os
import sys
from pathlib import Path

# Triton's stub ignores PYTHONPATH: in a checkout, the checkout's package serves its own model
for checkout in Path(__file__).resolve().parents[3:4]:
    if (checkout / "granikv" / "__init__.py").exists():
        sys.path.insert(0, str(checkout))

import triton_python_backend_utils as pb_utils  # noqa: E402

from granikv.serving.placement import check_instances  # noqa: E402
from granikv.serving.run_dir import end_with_launcher, failure_for_launcher  # noqa: E402
from granikv.serving.settings import read_settings  # noqa: E402
from granikv.serving.triton_adapter import TritonAdapter  # noqa: E402


class TritonPythonModel:
    """Decoupled: `execute` returns at once, answers leave through the requests' senders."""

    def initialize(self, args):
        """Start the engine process and wait until its model is loaded."""
        end_with_launcher()
        with failure_for_launcher():
            model_config = json.loads(args["model_config"])
            check_instances(model_config)
            parameters = model_config.get("parameters", {})
            settings = read_settings({k: v["string_value"] for k, v in parameters.items()})
            run_dir = Path(settings.run_dir)
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / "stub.pid").write_text(f"{os.getpid()}\n")
            self.adapter = TritonAdapter(pb_utils, settings)

    def execute(self, requests):
        for request in requests:
            self.adapter.submit(request)
        return None

    def finalize(self):
        """Answer what is in flight and end the engine process."""
        self.adapter.close()
