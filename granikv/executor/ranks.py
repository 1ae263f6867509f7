"""Tensor-parallel ranks of one engine: a process each, all running rank 0's plans.

    rank 0 (the engine's process)   plan ----- pipe -----> rank 1 .. n: the same step
           logits <---- gather ---- shards of the vocabulary
           sample, last ids ------- broadcast ----------> the next step's input ids

Plans travel through the child's standard input, private to both; the child ends with it, and at
once when its parent dies. What a rank's step does with the others is in group.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
import torch.distributed as dist

from granikv.config import EngineConfig
from granikv.core import StepPlan
from granikv.engines.manifest import Manifest, load_manifest
from granikv.engines.runtime import EngineRuntime
from granikv.errors import Unavailable
from granikv.executor.device_executor import Handle
from granikv.executor.group import RankSettings, RankSteps, join, make_store, share
from granikv.executor.tensorrt_executor import TensorRTExecutor, engine_sizes
from granikv.processes import die_with_parent
from granikv.sampling import Sampler

RUNTIME = "granikv.engines.runtime:TensorRTRuntime"
START_TIMEOUT_S = 300  # imports and the GPU's context
STOP_TIMEOUT_S = 10
LeaderT = TypeVar("LeaderT", bound="LeaderSteps")


class TensorRTRank(RankSteps, TensorRTExecutor):
    """One rank of a group that `join` has set up; rank 0's is the one the engine sees."""

    def __init__(
        self,
        engine_config: EngineConfig,
        folder: Path,
        manifest: Manifest,
        runtime: EngineRuntime,
        sampler: Sampler,
        device: torch.device,
        rank: int,
        tp_size: int,
    ):
        super().__init__(
            engine_config, folder, manifest, runtime, sampler, device, rank=rank, tp_size=tp_size
        )
        self.vocab_size = manifest.model.vocab_size
        runtime.join_ranks(rank, tp_size, share)

    def _whole_logits(self, num_samples: int) -> torch.Tensor:
        return self.gather_logits(self.logits[:num_samples])


class LeaderSteps(RankSteps):
    """Mixed into rank 0's executor: it sends every plan to the others, and ends them at close.

    Raises Unavailable when a rank ends on its own.
    """

    _processes: RankProcesses

    def launch(self, plan: StepPlan) -> Handle:
        try:
            self._processes.send(plan)
        except Unavailable as error:
            return Handle(None, None, torch.empty(0), 0, error=error)
        return super().launch(plan)

    def close(self) -> None:
        self._processes.close()
        super().close()
        dist.destroy_process_group()
        shutil.rmtree(Path(self._processes.store).parent, ignore_errors=True)


class TensorRTLeader(LeaderSteps, TensorRTRank):
    """Rank 0 of engines."""


class RankProcesses:
    """Processes of the ranks 1 to tp_size - 1."""

    def __init__(self, leader: RankSettings):
        self.processes: list[subprocess.Popen] = []
        self.store = leader.store
        for rank in range(1, leader.tp_size):
            settings = dataclasses.asdict(dataclasses.replace(leader, rank=rank))
            command = [sys.executable, "-m", "granikv.executor.ranks", json.dumps(settings)]
            command.append(str(os.getpid()))
            # a session of its own: Ctrl-C is the leader's, which ends the ranks in order
            self.processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            )

    def wait_ready(self) -> None:
        """Until every rank is about to join. Raises Unavailable when one ends or is too late."""
        deadline = time.monotonic() + START_TIMEOUT_S
        for rank, process in enumerate(self.processes, start=1):
            while not ready_file(self.store, rank).exists():
                if process.poll() is not None:
                    raise _ended(rank, process.returncode)
                if time.monotonic() > deadline:
                    raise Unavailable(f"rank {rank}: expected it within {START_TIMEOUT_S} s")
                time.sleep(0.05)

    def send(self, plan: StepPlan) -> None:
        """What a rank needs of the plan. Raises Unavailable when one has ended."""
        # requests and reasons stay here: the other ranks neither sample nor explain
        bare = dataclasses.replace(plan, sample_requests=[], new_requests=[], choices=[])
        content = pickle.dumps(bare, protocol=pickle.HIGHEST_PROTOCOL)
        for rank, process in enumerate(self.processes, start=1):
            assert process.stdin is not None
            try:
                process.stdin.write(struct.pack("<Q", len(content)) + content)
                process.stdin.flush()
            except OSError:
                raise _ended(rank, process.wait()) from None

    def close(self) -> None:
        """End of input: the ranks finish what they have and leave. Late ones are killed."""
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.close()
            except OSError:
                continue  # it has ended
        for process in self.processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def start_tensorrt(
    config: EngineConfig, manifest: Manifest, sampler: Sampler, runtime: str | None = None
) -> TensorRTExecutor:
    """Executor of config.engine_dir, with processes for the other ranks when config.tp is above 1.

    runtime: "module:callable" that every rank calls with plugin=config.plugin; None: TensorRT's. Raises Unavailable
    (no GPU where it is needed, no TensorRT, no plugin) and what TensorRTExecutor raises.
    """
    folder = Path(str(config.engine_dir))
    settings = settings_of(
        config,
        folder=str(folder),
        runtime=runtime or RUNTIME,
        runtime_options={"plugin": config.plugin},
    )
    made = make_runtime(settings)
    if made.device_type != config.device:
        raise Unavailable(
            f"executor='tensorrt': expected a device of type {made.device_type}, got "
            f"{config.device}; use a machine with a GPU, or executor='torch'"
        )
    # all that can be refused is refused before another process starts
    manifest.check(folder, config.tp, made.facts(), made.file_kind)
    engine_sizes(config, manifest)
    if config.tp == 1:
        return TensorRTExecutor(config, folder, manifest, made, sampler, config.device)

    def leader(device: torch.device) -> TensorRTLeader:
        return TensorRTLeader(config, folder, manifest, made, sampler, device, 0, config.tp)

    return start_group(settings, leader)


def start_group(settings: RankSettings, make_leader: Callable[[torch.device], LeaderT]) -> LeaderT:
    """Rank 0 of a new group of processes; make_leader gets its device once all have joined."""
    processes = RankProcesses(settings)
    try:
        processes.wait_ready()
        leader = make_leader(join(settings))
    except BaseException:
        processes.kill()
        raise
    leader._processes = processes
    return leader


def settings_of(config: EngineConfig, **more: Any) -> RankSettings:
    """Of rank 0, with a new rendezvous where there are others."""
    return RankSettings(
        rank=0,
        tp_size=config.tp,
        device=config.device,
        store=make_store() if config.tp > 1 else "",
        engine_config=json.loads(json.dumps(dataclasses.asdict(config), default=str)),
        **more,
    )


def ready_file(store: str, rank: int) -> Path:
    return Path(f"{store}.{rank}")


def _ended(rank: int, code: int) -> Unavailable:
    return Unavailable(
        f"rank {rank}: expected a running process, it ended with {code}; its own output says why; "
        "restart the engine"
    )


def make_runtime(settings: RankSettings) -> Any:
    module, _, name = str(settings.runtime).partition(":")
    return getattr(importlib.import_module(module), name)(**settings.runtime_options)


class NoSampler:
    """Of a rank that never samples."""

    def set_request(self, *arguments: Any) -> None:
        raise AssertionError("only rank 0 has requests")


def read_plan(stream: IO[bytes]) -> StepPlan | None:
    """The next plan, or None at the end of the stream."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    (length,) = struct.unpack("<Q", head)
    content = stream.read(length)
    return pickle.loads(content) if len(content) == length else None


def make_rank(settings: RankSettings, device: torch.device) -> Any:
    """The executor of a rank above 0."""
    config, sampler = EngineConfig(**settings.engine_config), cast(Any, NoSampler())
    if settings.runtime is None:
        from granikv.executor.torch_ranks import TorchRank  # needs triton

        return TorchRank(config, sampler, device, settings.rank)
    folder = Path(settings.folder)
    return TensorRTRank(
        config, folder, load_manifest(folder), make_runtime(settings), sampler, device,
        rank=settings.rank, tp_size=settings.tp_size,
    )  # fmt: skip


def main() -> int:
    """One rank above 0, until its standard input ends."""
    settings, parent_pid = RankSettings(**json.loads(sys.argv[1])), int(sys.argv[2])
    die_with_parent(parent_pid)
    plans = sys.stdin.buffer
    ready_file(settings.store, settings.rank).touch()
    device = join(settings)
    executor = make_rank(settings, device)
    while (plan := read_plan(plans)) is not None:
        handle = executor.launch(plan)
        if handle.error is not None:  # the group has lost its order: rank 0 is told by our end
            raise handle.error
    executor.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
