"""The norm of what ranks have made: processes in the interpreter, streams on a GPU."""

from __future__ import annotations

import pytest
import torch
from support import DEVICE, ON_GPU

from granikv.models import rank_sums
from granikv.models.fp8 import Fp8Input
from granikv.models.fused import add_rms_norm
from granikv.models.rank_sums import Exchange, exchange_shape

RANKS, MAX_ROWS = 3, 6
WIDTHS = (96, 4096) if ON_GPU else (96,)
# the interpreter truncates where fp32 becomes bf16
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
# rows and parts of the product, call after call: rows leave and come back, turns alternate
CALLS = [(5, 1), (6, 3), (1, 2), (6, 1), (2, 4), (6, 2)]


def made(call: int, width: int) -> tuple[torch.Tensor, ...]:
    """delta of all ranks, x, weight."""
    rows, parts = CALLS[call]
    g = torch.Generator().manual_seed(call)
    delta = torch.randn(RANKS, parts, rows, width, generator=g)
    delta[:, :, :, ::7] = -0.0  # what an exchange holds where nothing has come
    if parts == 1:
        delta = delta[:, 0].to(DTYPE)
    x, weight = torch.randn(rows, width, generator=g), torch.randn(width, generator=g)
    return tuple(t.to(DEVICE) for t in (delta, x.to(DTYPE), weight.to(DTYPE)))


def exchanges(own: list[torch.Tensor]) -> list[Exchange]:
    return [Exchange(r, tuple(own)) for r in range(RANKS)]


def memory(width: int) -> list[torch.Tensor]:
    shape = exchange_shape(RANKS, MAX_ROWS, width)
    return [torch.full(shape, float("nan"), dtype=DTYPE) for _ in range(RANKS)]


def is_empty(own: torch.Tensor) -> bool:
    """-0.0 everywhere: all that came was read."""
    return not own.any() and bool(own.signbit().all())


def run(exchange: Exchange, call: int, fp8: Fp8Input | None = None):
    delta, x, weight = made(call, exchange.own.shape[-1])
    assert exchange.takes(*x.shape, x.dtype)
    return rank_sums.add_rms_norm(exchange, call % 2, delta[exchange.rank], x, weight, 1e-5, fp8)


def check(results: list, call: int, width: int) -> None:
    """results: (normed, total) of each rank."""
    delta, x, weight = made(call, width)
    rounded = (delta.sum(1) if delta.dim() == 4 else delta).to(DTYPE)
    total = sum(rounded.float(), torch.zeros_like(x, dtype=torch.float32))  # in rank order
    total = (total + x.float()).to(DTYPE)
    normed, _ = add_rms_norm(total.cpu(), None, weight.cpu(), 1e-5)
    for got_normed, got_total in results:
        assert torch.equal(got_total, total), call
        assert torch.equal(got_normed, results[0][0])
        torch.testing.assert_close(got_normed.cpu(), normed, rtol=1e-2, atol=1e-3)


def interpreted_rank(rank: int, own: list[torch.Tensor], results: dict, meet) -> None:
    exchange = Exchange(rank, tuple(own))
    meet.wait()
    results[rank] = [run(exchange, call) for call in range(len(CALLS))]
    fp8 = run(exchange, 0, Fp8Input())[0]
    results[rank, "fp8"] = (fp8.values.view(torch.uint8), fp8.scales)


@pytest.mark.skipif(ON_GPU, reason="on a GPU streams are the ranks: the test below")
@pytest.mark.timeout(120)
def test_processes():
    context = torch.multiprocessing.get_context("spawn")
    own = [each.share_memory_() for each in memory(WIDTHS[0])]
    meet = context.Barrier(RANKS)
    with context.Manager() as manager:
        results = manager.dict()
        ranks = [
            context.Process(target=interpreted_rank, args=(rank, own, results, meet), daemon=True)
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(100)
        assert [rank.exitcode for rank in ranks] == [0] * RANKS
        results = dict(results)
    for call in range(len(CALLS)):
        check([results[rank][call] for rank in range(RANKS)], call, WIDTHS[0])
    fp8 = [results[rank, "fp8"] for rank in range(RANKS)]
    for values, scales in fp8[1:]:
        assert torch.equal(values, fp8[0][0]) and torch.equal(scales, fp8[0][1])
    got = fp8[0][0].view(torch.float8_e4m3fn).float() * fp8[0][1]
    torch.testing.assert_close(got, results[0][0][0].float(), rtol=0.07, atol=0.02)
    assert all(map(is_empty, own))


@pytest.mark.skipif(
    not ON_GPU, reason="needs a GPU: run pytest tests/kernels/test_rank_sums.py on one"
)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.timeout(120)
def test_streams(width):
    own = [each.to(DEVICE) for each in memory(width)]
    both = exchanges(own)
    streams = [torch.cuda.Stream() for _ in range(RANKS)]
    inputs = [made(call, width) for call in range(len(CALLS))]
    for rank in range(RANKS):  # compiled, one rank at a time, where all numbers have come
        for call in range(len(CALLS)):
            own[rank].zero_()
            run(both[rank], call)
    both = exchanges(own)
    torch.cuda.synchronize()
    results: list[list] = [[] for _ in range(RANKS)]
    for _ in range(50):
        for call, (delta, x, weight) in enumerate(inputs):
            for rank, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    made_here = rank_sums.add_rms_norm(
                        both[rank], call % 2, delta[rank], x, weight, 1e-5
                    )
                results[rank].append((call, made_here))
    torch.cuda.synchronize()
    for of_call in zip(*results, strict=True):
        check([made_here for _, made_here in of_call], of_call[0][0], width)
    assert all(map(is_empty, own))


def test_what_an_exchange_holds():
    exchange = exchanges(memory(96))[0]
    assert exchange.takes(MAX_ROWS, 96, DTYPE) and exchange.takes(1, 96, DTYPE)
    assert not exchange.takes(MAX_ROWS + 1, 96, DTYPE) and not exchange.takes(0, 96, DTYPE)
    assert not exchange.takes(1, 128, DTYPE) and not exchange.takes(1, 96, torch.float32)
