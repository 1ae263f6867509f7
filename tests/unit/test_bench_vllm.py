"""vLLM as a contender, with a stand-in for its package: what it is given, what is made of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from granikv.bench import decode as bench
from granikv.bench import vllm_contender
from granikv.bench.vllm_contender import choose_contenders, run_worker, vllm_step_ms
from granikv.config import EngineConfig
from granikv.errors import InvalidArgument, Unavailable

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 89, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
# a step takes 3 ms for each prompt; answers differ in length only
STAND_IN = """
import json, os, time
CALLS = os.environ["VLLM_STAND_IN_CALLS"]

class SamplingParams:
    def __init__(self, max_tokens, min_tokens, ignore_eos, temperature, detokenize):
        assert min_tokens == max_tokens and ignore_eos and temperature == 0.0 and not detokenize
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, **arguments):
        open(CALLS, "w").write(json.dumps(arguments) + "\\n")
    def generate(self, prompts, params, use_tqdm):
        ids = [p["prompt_token_ids"] for p in prompts]
        open(CALLS, "a").write(json.dumps([params.max_tokens, ids]) + "\\n")
        time.sleep(0.05 + 0.003 * params.max_tokens * len(prompts))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Calls of the stand-in, and a model folder for it."""
    (tmp_path / "packages" / "vllm").mkdir(parents=True)
    (tmp_path / "packages" / "vllm" / "__init__.py").write_text(STAND_IN)
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps({"vocab_size": 50}))
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    root = Path(bench.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "packages"), str(root)]))
    monkeypatch.setenv("VLLM_STAND_IN_CALLS", str(tmp_path / "calls"))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    return tmp_path / "calls", tmp_path / "shape"


def test_a_step_is_the_difference_of_two_lengths_in_another_process(stand_in):
    calls_file, folder = stand_in
    workload = bench.Workload("two", (("a",), ("b",), ("b",)), {"a": 5, "b": 7}, 3)
    config = EngineConfig(
        model=str(folder), random_weights=True, max_seq_len=40, max_num_batched_tokens=64
    )
    (times,) = vllm_step_ms("vllm-cascade", [workload], 10, 1, config)
    assert len(times) == 1 and 8.5 < times[0] < 20  # of the longer answer alone: 28
    arguments, *calls = map(json.loads, calls_file.read_text().splitlines())
    assert arguments["load_format"] == "dummy" and not arguments["disable_cascade_attn"]
    assert arguments["max_model_len"] == 56 and arguments["max_num_batched_tokens"] == 64
    assert [(n, len(ids)) for n, ids in calls[:2]] == [(1, 1), (1, 1)]  # prefixes, one by one
    assert {len(ids[0]) for _, ids in calls[:2]} == {8, 10}
    assert [n for n, _ in calls[2:]] == 2 * [1, 16, 26]
    assert calls[-1][1] == workload.prompts(0, 50)


def test_vllm_takes_part_where_it_can_read_the_model(stand_in, monkeypatch):
    _, folder = stand_in
    assert choose_contenders(None, str(folder)) == ["vllm-default", "vllm-cascade"]
    assert choose_contenders(None, None) == []
    assert choose_contenders(None, str(folder / "config.json")) == []
    assert choose_contenders(["uniform-paging"], str(folder)) == []
    assert choose_contenders(["vllm-default", "x"], str(folder)) == ["vllm-default", "x"]
    with pytest.raises(InvalidArgument, match="GGUF"):
        vllm_step_ms("vllm-default", [bench.shared(1, 0, 4)], 2, 1, EngineConfig())
    monkeypatch.setattr(vllm_contender, "has_vllm", lambda: False)
    assert choose_contenders(None, str(folder)) == []
    with pytest.raises(Unavailable, match="not installed"):
        run_worker({})


def test_its_times_are_compared_round_by_round(tmp_path, monkeypatch):
    def fake(name, workloads, num_steps, rounds, config):
        assert [w.batch for w in workloads] == [2, 3] and config.max_seq_len == 54
        return [[100.0, 300.0], [200.0, 200.0]]

    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    monkeypatch.setattr(bench, "vllm_step_ms", fake)
    cases = bench.run_decode_bench(
        [bench.shared(2, 40, 6), bench.shared(3, 40, 6)], 4, 2, str(tmp_path), False,
        engine_settings={"random_weights": True, "profile": "default"}, others=["vllm-default"],
    )  # fmt: skip
    assert [c.baseline for c in cases] == 2 * ["uniform-paging", "vllm-default"]
    assert cases[1].baseline_metrics["step_ms"] == 200.0
    assert cases[1].baseline_metrics["tokens_per_s"] == pytest.approx(2 / 0.2)
    slowest, fastest = (cases[1].baseline_metrics[f"step_ms_{end}"] for end in ("max", "min"))
    assert (slowest, fastest) == (300.0, 100.0)
    assert cases[1].metrics["step_ms"] == cases[0].metrics["step_ms"]


def test_a_worker_that_fails_or_saw_another_machine_is_refused(stand_in, monkeypatch):
    calls_file, _ = stand_in
    monkeypatch.setattr(vllm_contender, "WORKER", "no_such_module")
    with pytest.raises(Unavailable, match="ended with code 1"):
        run_worker({})
    worker = calls_file.parent / "packages" / "echo_worker.py"
    worker.write_text(
        "import json, sys; open(sys.argv[2], 'w').write(json.dumps("
        "json.load(open(sys.argv[1])) | {'machine': ['a GPU', '1']}))"
    )
    monkeypatch.setattr(vllm_contender, "WORKER", "echo_worker")
    with pytest.raises(Unavailable, match="a GPU"):
        run_worker({"x": 1})
    monkeypatch.setattr(vllm_contender, "machine", lambda: ("a GPU", "1"))
    assert run_worker({"x": 1})["x"] == 1
