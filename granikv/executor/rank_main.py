"""One rank's process: `python -m granikv.executor.rank_main SETTINGS`, until it is told to stop.

It launches every plan as it comes, while a second thread waits for the steps before; rank 0's
outputs go to the engine's process, an error on any rank ends it. So an error is told although the
first thread may wait in a collective for ever.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import sys
import threading
import traceback
import zlib
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist

from granikv.config import EngineConfig
from granikv.engines.manifest import load_manifest
from granikv.errors import GraniKVError, Unavailable
from granikv.executor.group import RankSettings, join, take_device
from granikv.executor.rank_channel import Digest, RankChannel
from granikv.executor.rank_processes import write_report
from granikv.executor.ranks import Facts, TensorRTRank, make_runtime
from granikv.sampling import Sampler

SWITCH_S = 2e-4  # the waiting thread gets Python's lock soon after its step ends


class NoSampler:
    """Of a rank that never samples."""

    def on(self, device: torch.device) -> NoSampler:
        return self

    def set_request(self, *arguments: Any) -> None:
        """Rank 0 keeps it."""


def make_rank(settings: RankSettings, device: torch.device) -> Any:
    """The executor of one rank."""
    config = EngineConfig(**settings.engine_config)

    def sampler(vocab_size: int) -> Sampler:
        if settings.rank:
            return cast(Sampler, NoSampler())
        return Sampler(config.max_requests, vocab_size, eos_token_ids=settings.eos_token_ids)

    if settings.runtime is None:
        from granikv.executor.torch_ranks import make_torch_rank

        return make_torch_rank(config, sampler, device, settings.rank)
    folder = Path(settings.folder)
    manifest = load_manifest(folder)
    return TensorRTRank(
        config, folder, manifest, make_runtime(settings), sampler(manifest.model.vocab_size),
        device, rank=settings.rank, tp_size=settings.tp_size,
    )  # fmt: skip


def run(settings: RankSettings, executor: Any, channel: RankChannel) -> None:
    """Every plan that comes, to the last one before "stop"."""
    launched: queue.SimpleQueue = queue.SimpleQueue()
    if executor.config.debug_checks:  # on a GPU it waits for every step
        executor.note_ids = partial(channel.note, Digest.IDS)
    waiter = threading.Thread(target=_report_outputs, args=(settings, executor, launched))
    waiter.start()
    while True:
        content = channel.receive()
        order, *arguments = pickle.loads(content)
        if order == "step":
            channel.note(Digest.PLAN, zlib.crc32(content))
            plan, executor.keep_logits = arguments
            launched.put(executor.launch(plan))
        elif order == "profile":
            if settings.rank == 0:
                write_report(settings.reports, "profile", executor.profile(*arguments))
        elif order == "stop":
            launched.put(None)
            waiter.join()
            return
        else:
            raise ValueError(f"order: expected step, profile or stop, got {order!r}")


def _report_outputs(settings: RankSettings, executor: Any, launched: queue.SimpleQueue) -> None:
    take_device(settings)  # of this thread, too: else it would open GPU 0
    while (handle := launched.get()) is not None:
        try:
            result = executor.wait(handle)
        except Exception as error:
            if error is not executor.sample_error:  # the ranks have lost their order
                end(settings, error)
            result = _portable(settings, error)
        if settings.rank == 0:
            write_report(settings.reports, "output", result)


def end(settings: RankSettings, error: BaseException) -> NoReturn:
    """Tells the engine's process why; at once, since a group that lost a rank may never be left."""
    traceback.print_exception(error)
    write_report(settings.reports, "error", _portable(settings, error))
    os._exit(1)


def _portable(settings: RankSettings, error: BaseException) -> Exception:
    """An error that can be sent and read in another process."""
    if isinstance(error, GraniKVError):
        return error
    return Unavailable(f"rank {settings.rank}: {type(error).__name__}: {error}")


def main() -> int:
    settings = RankSettings(**json.loads(sys.argv[1]))
    sys.setswitchinterval(SWITCH_S)
    try:
        device = take_device(settings)
        if device.type == "cpu" and not settings.engine_config["num_threads"]:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.tp_size))
        channel = RankChannel(settings.memory, list(settings.wakes), settings.rank)
        join(settings, device)
        write_report(settings.reports, "joined")
        executor = make_rank(settings, device)
        write_report(settings.reports, "ready", Facts.of(executor) if settings.rank == 0 else None)
        run(settings, executor, channel)
        executor.close()
        if device.type == "cuda":  # a group whose sums were captured may wait for ever in its end
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        dist.destroy_process_group()
    except BaseException as error:
        end(settings, error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
