"""A rank of the GPU's executor on a CPU, by Triton's interpreter: in the place of rank_main."""

from __future__ import annotations

import torch

from granikv.executor import rank_main, torch_ranks
from granikv.executor.all_reduce import GlooAllReduce
from granikv.executor.gpu_rank import GpuRank


def make_rank(config, make_sampler, device, rank):
    model, decoder = torch_ranks.load_rank(config, rank, device)
    decoder.reduce = GlooAllReduce()
    sampler = make_sampler(model.vocab_size)
    executor = GpuRank(config, decoder, sampler, device, rank, model.vocab_size)
    executor.warm_up()  # with collectives, by all ranks
    return executor


assert not torch.cuda.is_available()
torch_ranks.make_torch_rank = make_rank
raise SystemExit(rank_main.main())
