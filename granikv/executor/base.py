"""What the engine asks of an executor: launch a plan, wait for its output.

Plans run in the order they were launched. An executor never decides anything: the plan names
every slot, span and variant. It knows nothing of requests beyond their row.
"""

from __future__ import annotations

from typing import Any, Protocol

from granikv.core import StepOutput, StepPlan


class Executor(Protocol):
    def launch(self, plan: StepPlan) -> Any:
        """Start the step behind all steps launched before; returns a handle for `wait`."""

    def wait(self, handle: Any) -> StepOutput:
        """Output of the step. Raises what the step raised; later steps still run."""

    def close(self) -> None:
        """Finish launched steps and release the device."""
