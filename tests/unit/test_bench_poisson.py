"""Poisson arrivals: the list and its file, who is sent it, and what is made of the times."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import sys
import types

import pytest

from granikv.bench import poisson, vllm_worker
from granikv.bench.arrivals import (
    Arrival,
    ArrivalList,
    make_arrivals,
    read_arrivals,
    write_arrivals,
)
from granikv.bench.poisson import PoissonConfig, run_poisson_bench, serving_metrics
from granikv.bench.timed_engine import RequestTimes
from granikv.errors import InvalidArgument

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 89, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def test_a_list_is_poisson_and_survives_its_file(tmp_path):
    arrivals = make_arrivals(4000, [40, 7], 10, 6, seed=3)
    times = [a.time for a in arrivals.arrivals]
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert times == sorted(times) and sum(gaps) / 4000 == pytest.approx(1.0, abs=0.1)
    variance = sum((gap - 1) ** 2 for gap in gaps) / 4000
    assert variance == pytest.approx(1.0, abs=0.2)  # even gaps would have 0
    assert {a.suffix_len for a in arrivals.arrivals} == set(range(5, 16))
    assert {a.output_len for a in arrivals.arrivals} == set(range(3, 10))
    assert {a.group for a in arrivals.arrivals} == {0, 1}
    write_arrivals(arrivals, tmp_path / "list.json")
    assert read_arrivals(tmp_path / "list.json") == arrivals
    assert arrivals == make_arrivals(4000, [40, 7], 10, 6, seed=3)
    assert arrivals != make_arrivals(4000, [40, 7], 10, 6, seed=4)


def test_runs_share_prefixes_and_nothing_else():
    arrivals = make_arrivals(6, [40, 7], 10, 6)
    one, two = arrivals.prompts(500, 0), arrivals.prompts(500, 1)
    assert one == arrivals.prompts(500, 0)
    for a, prompt, other in zip(arrivals.arrivals, one, two, strict=True):
        prefix_len = arrivals.prefix_lens[a.group]
        assert len(prompt) == prefix_len + a.suffix_len
        assert prompt[:prefix_len] == other[:prefix_len] and prompt != other
    assert arrivals.due_s(4.0) == [a.time / 4 for a in arrivals.arrivals]
    assert set(arrivals.due_s(math.inf)) == {0.0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arrivals": []}, "requests"),
        ({"prefix_lens": []}, "requests, and prefixes"),
        ({"seed": "x"}, "seed, prefix_lens and arrivals"),
        ({"arrivals": [{"time": 0.0}]}, "seed, prefix_lens and arrivals"),
        ({"arrivals": [dataclasses.asdict(Arrival(1.0, 2, 1, 1))]}, "request 0.*a group below 2"),
        ({"arrivals": [dataclasses.asdict(Arrival(t, 0, 1, 1)) for t in (2.0, 1.0)]}, "request 1"),
        ({"arrivals": [dataclasses.asdict(Arrival(1.0, 0, 1, 0))]}, "request 0"),
    ],
)
def test_a_list_that_cannot_be_served_names_its_request(tmp_path, change, words):
    record = dataclasses.asdict(make_arrivals(3, [40, 7], 10, 6)) | change
    (tmp_path / "list.json").write_text(json.dumps(record))
    with pytest.raises(InvalidArgument, match=words):
        read_arrivals(tmp_path / "list.json")
    (tmp_path / "list.json").write_text("{")
    with pytest.raises(InvalidArgument, match="a JSON file"):
        read_arrivals(tmp_path / "list.json")


def test_goodput_counts_requests_that_keep_both_limits():
    requests = [
        RequestTimes(0.0, 5, [0.1, 0.2, 0.3]),
        RequestTimes(1.0, 5, [3.0, 3.1, 3.2]),  # late
        RequestTimes(2.0, 5, [2.1, 4.0, 5.0]),  # slow
        RequestTimes(2.0, 5, [2.5]),
    ]
    metrics = serving_metrics(requests, PoissonConfig(slo_ttft_ms=500.0, slo_itl_ms=110.0))
    assert metrics["good_share"] == 0.5
    assert metrics["goodput_requests_per_s"] == pytest.approx(2 / 5.0)
    assert metrics["tokens_per_s"] == pytest.approx(10 / 5.0)
    assert metrics["ttft_p50_ms"] == pytest.approx(300.0)
    assert metrics["itl_p50_ms"] == pytest.approx(100.0)
    assert 1000.0 < metrics["itl_p99_ms"] <= 1900.0


def test_every_contender_is_sent_the_same_list_at_shares_of_our_saturation(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    arrivals = make_arrivals(5, [70, 30], 8, 4, seed=1)
    settings = {"random_weights": True, "profile": "default", "num_threads": 1}
    sent: list[tuple] = []
    serve, vllm = poisson.serve, []

    def noted(contender, arrivals, prompts, rate):
        found = serve(contender, arrivals, prompts, rate)
        sent.append((contender.name, rate, prompts, found))
        return found

    def worker(spec):
        vllm.append(spec)
        times = {"arrival_s": 0.0, "prompt_len": 1, "token_s": [1.0, 2.0]}
        return {"runs": [[times] * 5 for _ in spec["rates"]]}

    monkeypatch.setattr(poisson, "serve", noted)
    monkeypatch.setattr(poisson, "run_worker", worker)
    cases = run_poisson_bench(
        arrivals, PoissonConfig(loads=(0.5,)), str(tmp_path), settings, ["vllm-default"]
    )
    assert [(c.case, c.baseline) for c in cases] == [
        (load, name)
        for load in ("saturation", "load-50")
        for name in ("uniform-paging", "vllm-default")
    ]
    assert {name for name, *_ in sent[-2:]} == {"granikv", "uniform-paging"}
    for first, second in (sent[0:2], sent[2:4], sent[4:6]):
        assert first[1:3] == second[1:3]
    saturation = next(s for s in sent[2:4] if s[0] == "granikv")[3]
    seconds = max(r.token_s[-1] for r in saturation) - saturation[0].arrival_s
    rate = 0.5 * 5 / seconds
    assert sent[4][1] == pytest.approx(rate) and sent[0][1] == math.inf
    assert vllm[0]["rates"][:2] == [None, None]
    assert vllm[0]["rates"][2] == pytest.approx(rate)
    begin = sent[4][3][0].arrival_s - arrivals.due_s(sent[4][1])[0]
    for request, due_s, arrival in zip(
        sent[4][3], arrivals.due_s(sent[4][1]), arrivals.arrivals, strict=True
    ):
        assert request.arrival_s - begin == pytest.approx(due_s)
        assert request.token_s[0] > request.arrival_s
        assert len(request.token_s) == arrival.output_len
    assert cases[0].ratio == pytest.approx(
        cases[0].metrics["tokens_per_s"] / cases[0].baseline_metrics["tokens_per_s"]
    )
    assert cases[3].ratio == pytest.approx(2000.0 / cases[3].metrics["latency_p50_ms"])


def test_vllm_gets_each_request_when_it_is_due(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    asked: list[tuple] = []

    class AsyncLLM:
        @classmethod
        def from_engine_args(cls, arguments):
            return cls()

        async def generate(self, prompt, sampling_params, request_id):
            asked.append((request_id, len(prompt["prompt_token_ids"]), sampling_params))
            for size in (2, sampling_params["max_tokens"] - 2):
                yield types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[0] * size)])

        def shutdown(self):
            asked.append(("shutdown",))

    for name, content in {
        "vllm": {},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": dict},
        "vllm.sampling_params": {
            "SamplingParams": dict, "RequestOutputKind": types.SimpleNamespace(DELTA="delta"),
        },
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
    }.items():  # fmt: skip
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    arrivals = ArrivalList(0, (9, 4), (Arrival(1.0, 1, 3, 5), Arrival(4.0, 0, 2, 6)))
    spec = {
        "model": str(tmp_path), "random_weights": True, "dtype": "auto", "tp": 1, "cascade": False,
        "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64,
        "arrivals": dataclasses.asdict(arrivals), "rates": [None, 40.0],
    }  # fmt: skip
    at_once, timed = asyncio.run(vllm_worker._serve(spec))["runs"]
    assert [r["arrival_s"] for r in at_once] == [0.0, 0.0]
    assert [r["arrival_s"] for r in timed] == [0.025, 0.1]
    for run in (at_once, timed):
        assert [len(r["token_s"]) for r in run] == [5, 6]
        assert all(min(r["token_s"]) >= r["arrival_s"] for r in run)
    assert [length for _, length, _ in asked[:4]] == [7, 11, 7, 11] and asked[4] == ("shutdown",)
    assert asked[0][2]["output_kind"] == "delta" and asked[0][2]["ignore_eos"]


@pytest.mark.parametrize(
    ("loads", "others", "words"),
    [((), (), "load"), ((0.0,), (), "load"), ((0.5,), ("vllm",), "vllm-default")],
)
def test_loads_and_contenders_are_checked_before_a_model_loads(loads, others, words, monkeypatch):
    monkeypatch.setattr(poisson, "EngineContender", None)
    with pytest.raises(InvalidArgument, match=words):
        run_poisson_bench(make_arrivals(2, [20], 4, 4), PoissonConfig(loads), None, {}, others)
