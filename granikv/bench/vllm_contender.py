"""vLLM beside GraniKV: started in a process of its own, since both want the GPU's memory.

    python -m granikv.bench.vllm_worker SPEC.json RESULT.json

The worker writes its GPU and driver with its times; those of another machine are refused.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from granikv.bench.harness import machine
from granikv.config import EngineConfig
from granikv.errors import InvalidArgument, Unavailable

if TYPE_CHECKING:
    from granikv.bench.decode import Workload

SHORT_LEN = 16  # tokens of the shorter of two answers, whose difference is decode steps
VLLM = ("vllm-default", "vllm-cascade")
WORKER = "granikv.bench.vllm_worker"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it compiles at first use, and greedy needs none
    "NCCL_NVLS_ENABLE": "0",
}


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def choose_contenders(named: Sequence[str] | None, model: str | None) -> list[str]:
    """Who runs beside GraniKV and uniform paging, which always runs: `uniform-paging` alone names
    nobody else. None: both of vLLM where it is installed and can read the model."""
    if named is not None:
        return [name for name in named if name != "uniform-paging"]
    usable = model is not None and Path(model).is_dir() and has_vllm()
    return list(VLLM) if usable else []


def vllm_step_ms(
    name: str,
    workloads: Sequence[Workload],
    num_steps: int,
    rounds: int,
    config: EngineConfig,
) -> list[list[float]]:
    """Decode-step ms of each workload and round. name: vllm-default or vllm-cascade.

    Raises what run_worker raises.
    """
    fields = [dataclasses.asdict(workload) for workload in workloads]
    spec = engine_spec(name, config, max(w.batch for w in workloads))
    spec |= {
        "task": "decode",
        "max_model_len": spec["max_model_len"] + SHORT_LEN,
        "short_len": SHORT_LEN,
        "workloads": fields,
        "num_steps": num_steps,
        "rounds": rounds,
    }
    return run_worker(spec)["step_ms"]


def engine_spec(name: str, config: EngineConfig, max_num_seqs: int) -> dict:
    """What the worker makes an engine of, as alike to ours as its options allow."""
    if config.model is None or Path(config.model).is_file():
        expected = "a Hugging Face folder, or --random-weights: vLLM reads no GGUF here"
        raise InvalidArgument("model", config.model, expected)
    return {
        "model": str(Path(config.model).resolve()),
        "random_weights": config.random_weights,
        "dtype": config.dtype,
        "tp": config.tp,
        "cascade": name == "vllm-cascade",
        "max_model_len": config.max_seq_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
    }


def run_worker(spec: dict, timeout_s: float = 900.0) -> dict:
    """The worker's result. Raises Unavailable: no vLLM, it failed, or it saw another GPU."""
    if not has_vllm():
        raise Unavailable("vllm: not installed for this Python; leave its contenders out")
    with tempfile.TemporaryDirectory(prefix="granikv_vllm_") as folder:
        spec_file, result_file = (Path(folder) / name for name in ("spec.json", "result.json"))
        spec_file.write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, "-m", WORKER, str(spec_file), str(result_file)]
        try:
            run = subprocess.run(
                command, env=os.environ | ENVIRONMENT, stdin=subprocess.DEVNULL, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"vllm: no result after {timeout_s} s") from None
        if run.returncode != 0 or not result_file.is_file():
            raise Unavailable(f"vllm: ended with code {run.returncode}, without a result")
        result = json.loads(result_file.read_text(encoding="utf-8"))
    if tuple(result["machine"]) != machine():
        raise Unavailable(f"vllm: expected {machine()}, it ran on {tuple(result['machine'])}")
    return result
