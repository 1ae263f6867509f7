"""Tensor-parallel ranks of one engine: a process each, all running the engine's plans.

    engine's process   plan ---- shared memory ----> every rank: the same step
                                                     logits <-- gather -- shards of the vocabulary
                                                     sampled ids -- broadcast --> next input ids
                       outputs <------ pipe -------- rank 0

Each engine has processes, and so a group, of its own. What a rank's step does with the others is
in group.py, its process in rank_main.py, their life in rank_processes.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from granikv.attention.plan_cutter import PlanCutter
from granikv.config import EngineConfig, ModelConfig
from granikv.core import StepOutput, StepPlan
from granikv.engines.manifest import Manifest
from granikv.engines.runtime import EngineRuntime
from granikv.errors import GraniKVError, Unavailable
from granikv.executor.group import COLLECTIVE_TIMEOUT_S, RankSettings, RankSteps, share
from granikv.executor.rank_processes import RankProcesses, Report
from granikv.executor.tensorrt_executor import Network, TensorRTExecutor, engine_sizes
from granikv.gpu_cost_model import SumTimes
from granikv.sampling import Sampler

RUNTIME = "granikv.engines.runtime:TensorRTRuntime"
JOIN_LIMIT_S = 300  # imports, the GPU's context and the group
LOAD_LIMIT_S = 3600  # a rank that dies or stops is noticed at once; this is for one that hangs
STEP_LIMIT_S = 2 * COLLECTIVE_TIMEOUT_S  # the collectives' own limit comes first and says more
WAIT_S = 0.5


class TensorRTRank(RankSteps, TensorRTExecutor):
    """One rank of a group that its process has joined."""

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


@dataclass(frozen=True)
class Facts:
    """Of rank 0's executor: what planning asks of it."""

    model: ModelConfig  # of one rank
    device_name: str
    cutter: PlanCutter | None  # None: a CPU, where nothing is cut
    capacity_tokens: int  # of every rank's arenas
    sum_times: SumTimes | None = None  # between GPUs, where they were measured

    @classmethod
    def of(cls, executor: Any) -> Facts:
        cutter = getattr(executor, "plan_cutter", None)
        name = getattr(executor, "device_name", "cpu")
        times = getattr(executor, "sum_times", None)
        return cls(executor.decoder.config, name, cutter, executor.config.arena_tokens, times)


@dataclass(eq=False)
class RankHandle:
    launched: float  # time.monotonic()
    output: StepOutput | None = None
    error: Exception | None = None

    def done(self) -> bool:
        return self.output is not None or self.error is not None


class RanksExecutor:
    """Executor of one model on several ranks. settings: of any rank.

    Raises Unavailable when a rank cannot start, and what loading raises in it. When a rank ends,
    stops or differs, every step under way or to come fails with Unavailable, and `failure` says so.
    """

    def __init__(self, settings: RankSettings):
        self.keep_logits = False
        self.processes = RankProcesses(settings)
        self._pending: deque[RankHandle] = deque()
        try:
            reports = self._gather([], "joined", JOIN_LIMIT_S)
            reports = self._gather(reports, "ready", LOAD_LIMIT_S)
        except BaseException:
            self.processes.kill()
            raise
        facts: Facts = next(r.content for r in reports if r.kind == "ready" and r.rank == 0)
        self.decoder = Network(facts.model)
        self.device_name, self.plan_cutter = facts.device_name, facts.cutter
        self.sum_times = facts.sum_times
        fields = settings.engine_config | {"capacity_tokens": facts.capacity_tokens}
        self.config = EngineConfig(**fields)

    def _gather(self, reports: list[Report], kind: str, limit_s: float) -> list[Report]:
        """reports and those that come until every rank has sent one of this kind."""
        deadline, everyone = time.monotonic() + limit_s, set(range(len(self.processes.processes)))
        while missing := everyone - {r.rank for r in reports if r.kind == kind}:
            if time.monotonic() > deadline:
                expected = f"ranks {sorted(missing)}: expected {kind!r} within {limit_s} s"
                self.processes.fail(Unavailable(f"{expected}; their output says where they are"))
            reports += self.processes.receive(WAIT_S)
        return reports

    # --- the executor's interface

    def launch(self, plan: StepPlan) -> RankHandle:
        """Tell every rank; an error is raised by `wait`, never here."""
        handle = RankHandle(time.monotonic())
        # requests and reasons stay here: ranks neither commit nor explain
        bare = dataclasses.replace(plan, sample_requests=[], choices=[])
        try:
            self.processes.send(("step", bare, self.keep_logits))
            self._pending.append(handle)
        except GraniKVError as error:
            handle.error = error
        return handle

    def wait(self, handle: RankHandle) -> StepOutput:
        """Output of the step. Raises what the step raised on rank 0, or why there are no ranks."""
        while not handle.done():
            self._take_outputs(WAIT_S)
            if time.monotonic() - handle.launched > STEP_LIMIT_S and not handle.done():
                self._fail(Unavailable(f"ranks: a step ran for over {STEP_LIMIT_S} s"))
        if handle.error is not None:
            raise handle.error
        assert handle.output is not None
        return handle.output

    def failure(self) -> Exception | None:
        """Why no step can run any more; None while all ranks live."""
        if self.processes.failure is None:
            self._take_outputs(0.0)
        return self.processes.failure

    def _take_outputs(self, timeout_s: float) -> None:
        try:
            reports = self.processes.receive(timeout_s)
        except GraniKVError as error:
            self._fail(error)
            return
        for report in reports:
            handle = self._pending.popleft()
            if isinstance(report.content, Exception):
                handle.error = report.content
            else:
                handle.output = report.content

    def _fail(self, error: GraniKVError) -> None:
        """Of every step under way."""
        with contextlib.suppress(GraniKVError):
            self.processes.fail(error)
        while self._pending:
            self._pending.popleft().error = error

    def profile(self, begin: bool) -> float:
        """Seconds of the all-reduces on rank 0 between profile(True) and profile(False)."""
        self.processes.send(("profile", begin))
        while not (reports := self.processes.receive(WAIT_S)):
            pass
        return reports[0].content

    def close(self) -> None:
        self.processes.close()


def start_torch(config: EngineConfig, eos_token_ids: tuple[int, ...] = ()) -> RanksExecutor:
    """Executor of config.model on config.tp ranks. Raises what RanksExecutor raises."""
    return RanksExecutor(settings_of(config, eos_token_ids))


def start_tensorrt(
    config: EngineConfig, manifest: Manifest, sampler: Sampler, runtime: str | None = None
) -> TensorRTExecutor | RanksExecutor:
    """Executor of config.engine_dir, in processes for its ranks when config.tp is above 1.

    runtime: "module:callable" that every rank calls with plugin=config.plugin; None: TensorRT's. Raises Unavailable
    (no GPU where it is needed, no TensorRT, no plugin) and what TensorRTExecutor raises.
    """
    folder = Path(str(config.engine_dir))
    settings = settings_of(
        config,
        sampler.eos_token_ids,
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
    return RanksExecutor(settings)


def settings_of(config: EngineConfig, eos_token_ids: tuple[int, ...], **more: Any) -> RankSettings:
    """Of rank 0; the others' differ in the rank alone."""
    fields = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return RankSettings(0, config.tp, config.device, fields, eos_token_ids, **more)


def make_runtime(settings: RankSettings) -> Any:
    module, _, name = str(settings.runtime).partition(":")
    return getattr(importlib.import_module(module), name)(**settings.runtime_options)
