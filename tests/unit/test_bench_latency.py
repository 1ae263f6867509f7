"""The latency benchmark on a tiny model: what is timed, what is compared, what is refused."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from granikv.bench import latency_decode
from granikv.bench.gpu_idle import KernelTimeline, kernel_intervals, timeline_of
from granikv.bench.latency import run_latency_bench
from granikv.bench.latency_prefill import prefill_flops
from granikv.bench.latency_session import LatencyConfig
from granikv.bench.streams import EngineProcess, StreamClients, StreamRate
from granikv.bench.timed_engine import RequestTimes, TimedEngine
from granikv.config import ModelConfig
from granikv.errors import InvalidArgument, Unavailable
from granikv.serving import wire

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 89, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = LatencyConfig(
    prompt_len=272, suffix_len=16, together=4, batch=3, streams=4, steps=6, repeats=2
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return {
        "model": str(folder), "random_weights": True, "device": "cpu", "profile": "default",
        "capacity_tokens": 8192, "min_extent_tokens": 16, "num_threads": 1,
    }  # fmt: skip


def bench(settings, case, config=SMALL):
    model = settings["model"]
    cases, probe = run_latency_bench(config, [case], model, settings)
    return {entry.case: entry for entry in cases}, probe


def test_the_shared_prefix_of_a_cold_start_is_computed_once(settings):
    cases, probe = bench(settings, "ttft")
    prefix, suffix = SMALL.prefix_len, SMALL.suffix_len
    for kind, computed in (
        ("cold", prefix + suffix), ("shared-cold", prefix + 4 * suffix), ("warm", suffix),
        ("hot", suffix),
    ):  # fmt: skip
        case = cases[f"ttft-{kind}"]
        assert case.baseline == "uniform-paging"
        for metrics in (case.metrics, case.baseline_metrics):
            assert metrics["computed_tokens"] == computed, kind
            assert 0 < metrics["ttft_ms"] <= metrics["ttft_last_ms"]
    rate = cases["prefill-rate"]
    share = rate.metrics["tflop_per_s"] / probe["matmul_tflop_per_s"]
    assert rate.metrics["matmul_share"] == pytest.approx(share)
    assert rate.ratio == pytest.approx(share / 0.55)
    assert rate.metrics["ttft_ms"] == cases["ttft-cold"].metrics["ttft_ms"]


def test_prefill_flops_are_those_of_every_row():
    model = ModelConfig("llama", 3, 20, 28, 4, 2, 8, 50, 64)
    expected = 2 * 20 * 50  # one row of logits
    for position in range(7):
        for _ in range(3):
            expected += 2 * 20 * (4 + 2 + 2) * 8 + 2 * 4 * 8 * 20 + 2 * 3 * 20 * 28
            expected += 2 * 2 * 4 * 8 * (position + 1)
    assert prefill_flops(model, 7) == expected


def test_tokens_beside_a_prefill_are_timed_for_each_size_of_its_pieces(settings):
    config = LatencyConfig(
        prompt_len=272, suffix_len=16, batch=3, steps=6, repeats=1, chunks=(35, 71), streams=4
    )
    cases, _ = run_latency_bench(config, ["itl"], settings["model"], settings)
    gaps = {c.params["max_num_batched_tokens"]: c.metrics["gaps"] for c in cases}
    # pieces of 32 and 68 rows beside 3 that decode; the first gap began before the prompt came
    assert gaps == {chunk: 3 * (-(-272 // (chunk - 3)) + 1) for chunk in (35, 71)}
    for case in cases:
        limit = 3 * case.metrics["step_ms"] + 25.0
        assert case.baseline == "aim" and case.baseline_metrics == {"itl_p99_ms": limit}
        assert case.ratio == pytest.approx(limit / case.metrics["itl_p99_ms"])
        assert case.metrics["itl_p50_ms"] <= case.metrics["itl_p99_ms"]


def test_gaps_are_taken_by_when_they_end():
    times = RequestTimes(1.0, 5, [3.0, 4.0, 8.0, 8.5])
    assert times.ttft_s == 2.0
    assert times.gaps_s() == [1.0, 4.0, 0.5]
    assert times.gaps_s(4.0, 8.0) == [4.0]


def test_overlapping_kernels_are_busy_once():
    kernels = [(40.0, 50.0), (0.0, 10.0), (5.0, 20.0), (6.0, 8.0), (20.0, 25.0)]
    timeline = timeline_of(kernels)
    assert (timeline.span_us, timeline.busy_us, timeline.num_kernels) == (50.0, 35.0, 5)
    assert timeline.idle_share == pytest.approx(0.3)
    with pytest.raises(ValueError, match="at least one kernel"):
        timeline_of([])


def test_copies_and_annotations_are_no_kernels():
    def event(name, start, end, **more):
        return FunctionEvent(0, name, 0, start, end, device_type=DeviceType.CUDA, **more)

    events = [
        event("matmul", 1.0, 2.0),
        event("Memcpy DtoH (Device -> Pinned)", 2.0, 3.0),
        event("Memset (Device)", 3.0, 4.0),
        event("step", 0.0, 9.0, is_user_annotation=True),
    ]
    assert kernel_intervals(events) == [(1.0, 2.0)]


def test_the_idle_share_is_of_the_steps_that_were_traced(settings, monkeypatch):
    traced, stepped, step = [], [], TimedEngine.step

    def timeline(function):
        before = len(stepped)
        function()
        traced.append(len(stepped) - before)
        return KernelTimeline(6e3, 4.5e3, 60)

    def counted(self):
        stepped.append(len(self.requests))
        step(self)

    monkeypatch.setattr(TimedEngine, "step", counted)
    monkeypatch.setattr(latency_decode, "kernel_timeline", timeline)
    monkeypatch.setattr("granikv.bench.latency_session.machine_probe", dict)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    (case,), _ = run_latency_bench(SMALL, ["idle"], settings["model"], settings)
    assert traced == [SMALL.steps] and stepped[-1] == SMALL.streams
    assert case.metrics["idle_share"] == 0.25
    assert case.metrics["traced_step_ms"] == pytest.approx(6.0 / SMALL.steps)
    assert case.ratio == pytest.approx(0.03 / 0.25)


def test_clients_count_what_they_read_whole():
    clients = StreamClients(["a", "b"])
    try:
        for step in range(200):
            for name in "ab":
                clients.send(
                    wire.Output(
                        name, text="x" * 3000, token_ids=[step, 1], num_output_tokens=2 * step + 2
                    )
                )
        deadline = time.monotonic() + 10
        while len(clients.marks) < 200 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(clients.marks) == 200 and clients.num_read == 2 * 200
        assert clients.marks[-1][1] >= 2 * 200 + 2
        seconds = clients.marks[-1][0] - clients.marks[100][0]
        tokens = clients.marks[-1][1] - clients.marks[100][1]
        assert clients.tokens_per_s(100) == tokens / seconds
    finally:
        clients.close()


def test_streams_of_an_engine_process_are_measured_and_its_death_is_an_error(settings):
    prompts = [[5, 6, 7, 8 + i] for i in range(3)]
    with EngineProcess(settings) as process:
        started = time.monotonic()
        rates = [process.measure(prompts, 20, with_clients=x) for x in (False, True)]
        elapsed_s = time.monotonic() - started
        for rate in rates:
            assert 0 < 20 * rate.step_ms < 1e3 * elapsed_s
        assert rates[0].tokens_per_s == pytest.approx(3e3 / rates[0].step_ms)
        assert 20 * 3 / elapsed_s < rates[1].tokens_per_s < 10 * 3e3 / rates[1].step_ms
        os.kill(process._client.process.pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="died"):
            process.measure(prompts, 20, with_clients=True)


def test_stream_cases_compare_with_this_process_and_with_no_clients(settings, monkeypatch):
    class Process:
        def __init__(self, engine_config):
            assert engine_config["random_weights"] and "prefix_layout" not in engine_config

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def measure(self, prompts, num_steps, with_clients):
            assert len({tuple(prompt) for prompt in prompts}) == SMALL.streams
            return StreamRate(1.25, 3000.0) if with_clients else StreamRate(1.0, 4000.0)

    monkeypatch.setattr(latency_decode, "EngineProcess", Process)
    cases, _ = bench(settings, "streams")
    tokens, step = cases["streams-tokens"], cases["streams-step"]
    assert tokens.ratio == pytest.approx(3000.0 / tokens.baseline_metrics["tokens_per_s"])
    made = 1e3 * SMALL.streams / tokens.baseline_metrics["step_ms"]
    assert tokens.baseline_metrics["tokens_per_s"] == pytest.approx(made, rel=0.8)
    assert step.ratio == pytest.approx(0.8) and step.baseline_metrics["step_ms"] == 1.0


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("idle", {}, "no CUDA device"),
        ("tftt", {}, "one of"),
        ("ttft", {"prompt_len": 16}, "prompt_len"),
        ("ttft", {"prompt_len": 4000}, "prompt_len and what is decoded"),
        ("itl", {"chunks": (3,)}, "chunk: expected 4 to max_num_batched_tokens=512"),
        ("itl", {"chunks": (513,)}, "chunk"),
        ("streams", {"streams": 513}, "streams: expected at most 512"),
        ("ttft", {"repeats": 0}, "repeats"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_model_loads(
    settings, case, changes, words, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("granikv.bench.latency.Session", None)
    config = LatencyConfig(**{**vars(SMALL), **changes})
    with pytest.raises((InvalidArgument, Unavailable), match=words):
        bench(settings, case, config)
