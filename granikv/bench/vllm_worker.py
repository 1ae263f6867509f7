"""The process that runs vLLM for a benchmark: reads a spec, writes times.

A decode step is the difference between two lengths of the same answers, divided by the steps
between them: what vLLM does once per call (tokens in, scheduling of the prompts) cancels out.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from granikv.bench.arrivals import parse_arrivals
from granikv.bench.decode import Workload
from granikv.bench.harness import machine

MEMORY_SHARE = 0.9


def engine_arguments(spec: dict) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM and of AsyncEngineArgs."""
    return {
        "model": spec["model"],
        "load_format": "dummy" if spec["random_weights"] else "auto",
        "skip_tokenizer_init": True,
        "dtype": spec["dtype"],
        "tensor_parallel_size": spec["tp"],
        "max_model_len": spec["max_model_len"],
        "max_num_seqs": spec["max_num_seqs"],
        "max_num_batched_tokens": spec["max_num_batched_tokens"],
        "gpu_memory_utilization": MEMORY_SHARE,
        "enable_prefix_caching": True,
        "disable_cascade_attn": not spec["cascade"],
        "disable_log_stats": True,
    }


def sampling(num_tokens: int) -> dict[str, Any]:
    """Keyword arguments of vllm.SamplingParams: greedy, exactly num_tokens, no text."""
    return {
        "max_tokens": num_tokens,
        "min_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "detokenize": False,
    }


def decode_step_ms(spec: dict) -> dict:
    import vllm

    llm = vllm.LLM(**engine_arguments(spec))
    vocab_size = _vocab_size(spec)

    def seconds(prompts: list[list[int]], num_tokens: int) -> float:
        params = vllm.SamplingParams(**sampling(num_tokens))
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return time.perf_counter() - begin

    step_ms, short_len = [], spec["short_len"]
    for fields in spec["workloads"]:
        workload = Workload(**fields | {"paths": tuple(map(tuple, fields["paths"]))})
        num_steps = spec["num_steps"] * workload.steps_factor
        times = []
        prompts = workload.prompts(-1, vocab_size)
        for path in set(workload.paths):  # alone: together they would all compute the prefix
            seconds([prompts[workload.paths.index(path)]], 1)
        for index in range(-1, spec["rounds"]):  # the round before the first fills caches
            prompts = workload.prompts(index, vocab_size)
            seconds(prompts, 1)  # from here on all of them are cached
            short, long = (seconds(prompts, n) for n in (short_len, short_len + num_steps))
            if index >= 0:
                times.append(1e3 * (long - short) / num_steps)
        step_ms.append(times)
    return {"step_ms": step_ms}


def serve(spec: dict) -> dict:
    """The arrival list at each rate (None: all at once), through AsyncLLM; times in s since then."""
    return asyncio.run(_serve(spec))


async def _serve(spec: dict) -> dict:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    arrivals = parse_arrivals(spec["arrivals"], "spec")
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(spec)))

    async def request(name: str, begin_s: float, due_s: float, prompt: list[int], length: int):
        await asyncio.sleep(max(0.0, begin_s + due_s - time.perf_counter()))
        params = SamplingParams(**sampling(length), output_kind=RequestOutputKind.DELTA)
        token_s: list[float] = []
        async for output in engine.generate({"prompt_token_ids": prompt}, params, name):
            now_s = time.perf_counter() - begin_s
            token_s += [now_s] * len(output.outputs[0].token_ids)
        return {"arrival_s": due_s, "prompt_len": len(prompt), "token_s": token_s}

    runs = []
    for index, rate in enumerate(spec["rates"]):
        prompts = arrivals.prompts(_vocab_size(spec), index)
        due_s = arrivals.due_s(math.inf if rate is None else rate)
        begin_s = time.perf_counter()
        tasks = [
            request(f"{index}-{i}", begin_s, due, prompt, arrival.output_len)
            for i, (due, prompt, arrival) in enumerate(
                zip(due_s, prompts, arrivals.arrivals, strict=True)
            )
        ]
        runs.append(await asyncio.gather(*tasks))
    engine.shutdown()
    return {"runs": runs}


def _vocab_size(spec: dict) -> int:
    return json.loads((Path(spec["model"]) / "config.json").read_text())["vocab_size"]


TASKS = {"decode": decode_step_ms, "serve": serve}


def main() -> None:
    spec_file, result_file = map(Path, sys.argv[1:])
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    result = TASKS[spec["task"]](spec)
    result_file.write_text(json.dumps(result | {"machine": machine()}), encoding="utf-8")


if __name__ == "__main__":
    main()
