"""What an operator asks first: model, KV cache, profile, versions, and a running server's state.

Everything is returned as plain dictionaries, section -> name -> value; nothing is measured or
loaded but the model's header.
"""

from __future__ import annotations

import dataclasses
import datetime
import http.client
import importlib.metadata
import json
import platform
import re
import shutil
import urllib.request
from pathlib import Path

from granikv import calibration, env
from granikv.config import EngineConfig, ModelConfig
from granikv.config_check import check_engine, longest_request
from granikv.cost_model import DEFAULT_PROFILE
from granikv.errors import (
    InvalidArgument,
    ModelFileError,
    Unavailable,
    Unsupported,
    check_host_port,
)
from granikv.executor import resolve_device
from granikv.models import find_model

TYPICAL_REQUEST_TOKENS = 2048
WHEEL_SERVERS = {"0.7.0": "2.51.0"}  # nvidia-pytriton -> the Triton server inside
SERIES = re.compile(r"^(nv_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
SHARED_PATHS = ("cascade", "gemm", "flat")


def package_version(name: str = "granikv") -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def describe(config: EngineConfig) -> dict[str, dict[str, object]]:
    """All sections of `granikv inspect`; of a model that cannot be read, the `error`.

    Raises InvalidArgument for an unreadable environment variable or a wrong setting."""
    sections: dict[str, dict[str, object]] = {}
    try:
        path = find_model(config.model)
        _, model = check_engine(config)
        shape = {f.name: getattr(model, f.name) for f in dataclasses.fields(ModelConfig)}
        sections["model"] = {"path": str(path), "embedded": config.model is None, **shape}
        sections["KV cache"] = kv_facts(config, model)
        sections["hardware profile"] = profile_facts(config, model)
    except (ModelFileError, Unsupported) as error:
        sections["model"] = {"error": str(error)}
    return sections | {
        "versions": versions(),
        "environment": env.describe(),
        "engine configuration": dataclasses.asdict(config),
    }


def kv_facts(config: EngineConfig, model: ModelConfig) -> dict[str, object]:
    config = resolve_device(config)
    token_bytes = model.kv_bytes_per_token(config.kv_element_bytes)
    size: dict[str, object] = {
        "capacity, tokens": "planned at the start from what is free beside the weights",
        "gpu_memory_utilization": config.gpu_memory_utilization,
    }
    if config.capacity_tokens is not None:
        usable = config.capacity_tokens - 1  # the last slot is for padding
        size = {
            "capacity, tokens": usable,
            "arena, bytes": config.capacity_tokens * token_bytes,
            "longest request, tokens": longest_request(config, model),
            f"requests of {TYPICAL_REQUEST_TOKENS} unshared tokens": usable
            // TYPICAL_REQUEST_TOKENS,
        }
    return {
        "device": config.device,
        "dtype": config.kv_dtype,
        "layout": config.prefix_layout,
        "bytes per token": token_bytes,
        **size,
    }


def profile_facts(config: EngineConfig, model: ModelConfig) -> dict[str, object]:
    if config.profile is None:
        path = calibration.profile_path(model, config.num_threads)
    else:
        path = DEFAULT_PROFILE if config.profile == "default" else Path(config.profile)
    facts: dict[str, object] = {"path": str(path)}
    if not path.is_file():
        return facts | {
            "state": "not measured on this machine: the shipped one serves until `granikv calibrate`, "
            "or a start on a quiet machine, has measured it"
        }
    try:
        profile = json.loads(path.read_text())
        modified = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
        date = datetime.datetime.fromisoformat(profile.get("date") or modified.isoformat())
        age = datetime.datetime.now(datetime.UTC) - date
        return facts | {
            "age": f"{age.days} days {age.seconds // 3600} h",
            "device": profile["device"],
            "threads": profile["num_threads"],
            "torch": profile["torch"],
            "read, GB/s": round(profile["read_gb_per_s"], 1),
            "matrix rate, GFLOP/s": round(profile["gflops"], 1),
            "warnings": list(profile.get("warnings", ())),
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return facts | {"state": f"unreadable ({error!r}): `granikv calibrate` writes it again"}


def versions() -> dict[str, object]:
    names = ("torch", "numpy", "tritonclient", "triton", "tokenizers", "transformers")
    found: dict[str, object] = {"granikv": package_version(), "python": platform.python_version()}
    found |= {name: package_version(name) for name in names}
    found["Triton server"] = triton_server_version()
    return found


def triton_server_version() -> str:
    on_path = shutil.which("tritonserver")
    if on_path:
        version_file = Path(on_path).resolve().parents[1] / "TRITON_VERSION"
        known = version_file.read_text().strip() if version_file.is_file() else "version unknown"
        return f"{known} ({on_path})"
    wheel = package_version("nvidia-pytriton")
    if wheel == "not installed":
        return wheel
    return f"{WHEEL_SERVERS.get(wheel, 'version unknown')} (nvidia-pytriton {wheel})"


def metrics_url(address: str) -> str:
    """The metrics page of `host:port`, or of a URL. Raises InvalidArgument."""
    text = address if "://" in address else f"http://{address}"
    where = "of the metrics (8002 by default)"
    match = re.fullmatch(r"(https?://)([^/]*)(/metrics)?/?", text)
    if match is None:
        raise InvalidArgument("--url", address, f"host:port {where}")
    check_host_port("--url", match[2], where)
    return f"{match[1]}{match[2]}/metrics"


def read_series(address: str, timeout_s: float = 10.0) -> dict[str, float]:
    """nv_* series, labels included, of a running server. Raises Unavailable."""
    url = metrics_url(address)
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            text = answer.read().decode()
    except (OSError, http.client.HTTPException) as error:  # no server, or one of another kind
        reason = getattr(error, "reason", error)  # some hold bytes of another protocol
        raise Unavailable(
            f"{url}: no metrics there ({str(reason).encode('unicode_escape').decode()}); is the "
            "server running, and this its metrics port (8002 unless told otherwise)?"
        ) from None
    return {
        f"{name}{{{labels}}}" if labels else name: float(value)
        for name, labels, value in SERIES.findall(text)
    }


def describe_server(series: dict[str, float]) -> dict[str, dict[str, object]]:
    """Sections of a running server. Raises Unavailable when it is no GraniKV server."""

    def get(name: str) -> float:
        return series.get(f"nv_granikv_{name}", 0.0)

    if "nv_granikv_max_requests" not in series:
        raise Unavailable(
            "these metrics have no nv_granikv_* series: no GraniKV server, or loading"
        )
    prompt, read = get("prompt_tokens"), get("kv_bytes_read")
    finished = {
        key.split('"')[1]: int(value)
        for key, value in series.items()
        if key.startswith("nv_granikv_finished{") and value
    }
    return {
        "requests": {
            "running": int(get("running_requests")),
            "waiting": int(get("waiting_requests")),
            "at most running": int(get("max_requests")),
            "so far": int(get("requests")),
            "finished": ", ".join(f"{k} {v}" for k, v in finished.items()) or "none",
            "preemptions": int(get("preemptions")),
        },
        "KV cache now": {
            "capacity, tokens": int(get("capacity_tokens")) - 1,  # the last slot is for padding
            "used": f"{get('used_fraction'):.1%}",
            "HOT, tokens": int(get("kv_hot_tokens")),
            "COLD, tokens": int(get("kv_cold_tokens")),
        },
        "since the start": {
            "prompt tokens": int(prompt),
            "of them found stored": f"{get('cached_tokens') / prompt:.1%}" if prompt else "-",
            "generated tokens": int(get("generated_tokens")),
            "KV bytes read": int(read),
            "unshared reads would be": f"{get('kv_bytes_flat') / read:.2f} times" if read else "-",
            "groups by path": ", ".join(f"{p} {int(get(f'groups_{p}'))}" for p in SHARED_PATHS),
            "steps": int(get("steps")),
            "failed steps": int(get("failed_steps")),
            "kernels compiled in steps": int(get("kernels_compiled_after_start")),
            "mean step, ms": _ratio(get("step_us") / 1e3, get("steps")),
        },
        "latency": {
            "time to first token, mean s": _mean(series, "time_to_first_token_seconds"),
            "inter-token, mean s": _mean(series, "inter_token_latency_seconds"),
            "inter-token, 99% under s": _quantile(series, "inter_token_latency_seconds", 0.99),
            "queue, mean s": _mean(series, "queue_time_seconds"),
        },
    }


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.4g}" if b else "-"


def _total(series: dict[str, float], name: str) -> float:
    """Over labels: Triton adds the model's to its histograms."""
    return sum(v for k, v in series.items() if k.partition("{")[0] == f"nv_granikv_{name}")


def _mean(series: dict[str, float], name: str) -> str:
    return _ratio(_total(series, f"{name}_sum"), _total(series, f"{name}_count"))


def _quantile(series: dict[str, float], name: str, q: float) -> str:
    """The upper bound of the bucket that holds the quantile."""
    pattern = re.compile(rf'nv_granikv_{name}_bucket{{.*le="([^"]+)"')
    buckets = sorted((float(m[1]), v) for k, v in series.items() if (m := pattern.match(k)))
    if not buckets or not buckets[-1][1]:
        return "-"
    return next(f"{bound:g}" for bound, count in buckets if count >= q * buckets[-1][1])
