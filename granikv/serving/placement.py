"""Where a model instance runs: that there is one, and on which GPUs its engine does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from granikv.errors import InvalidArgument

VISIBLE = "CUDA_VISIBLE_DEVICES"


def check_instances(model_config: Mapping[str, Any]) -> None:
    """model_config: Triton's, of the model. Raises InvalidArgument unless it has one instance.

    Two would each take the memory of a GPU, and requests that share a prefix would meet in neither.
    """
    groups = model_config.get("instance_group") or [{}]
    count = sum(int(group.get("count", 1)) for group in groups)
    if count != 1:
        expected = (
            "1: an instance takes its GPU's memory, batches all requests and shares their prefixes; "
            "set tp for more GPUs, or run replicas with a repository each"
        )
        raise InvalidArgument("instance_group: count", count, expected)
    kind = groups[0].get("kind", "KIND_CPU")
    if kind not in ("KIND_CPU", "KIND_AUTO"):
        expected = "KIND_CPU: the engine is a process of its own; name its GPUs by `devices`"
        raise InvalidArgument("instance_group: kind", kind, expected)


def visible_devices(
    devices: str, engine_config: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> str:
    """CUDA_VISIBLE_DEVICES of the engine's process; "" leaves it as it is.

    devices: "2,3", the GPU of each rank in order, counted among those that this process sees.
    Raises InvalidArgument.
    """
    if not devices.strip():
        return ""
    tp = engine_config.get("tp", 1)
    numbers = [part.strip() for part in devices.split(",")]
    if not all(number.isdecimal() for number in numbers) or len(set(numbers)) != len(numbers):
        raise InvalidArgument("devices", devices, "different GPU numbers with commas: '0,1'")
    if len(numbers) != tp:
        raise InvalidArgument("devices", devices, f"{tp} of them, one for each rank (tp={tp})")
    if engine_config.get("device", "auto") == "cpu":
        raise InvalidArgument("devices", devices, "none beside device='cpu'")
    seen = (os.environ if environ is None else environ).get(VISIBLE, "").strip()
    if not seen:
        return ",".join(numbers)
    names = [name.strip() for name in seen.split(",")]
    beyond = [number for number in numbers if int(number) >= len(names)]
    if beyond:
        expected = f"numbers below {len(names)}: {VISIBLE} is {seen!r}"
        raise InvalidArgument("devices", devices, expected)
    return ",".join(names[int(number)] for number in numbers)
