"""Who takes part in the decode benchmark: the engine in either layout, and transformers.

All run in one process with the same number of torch threads. Engines decode in turns, a few steps
each, so that a change of the machine's speed meets both; transformers' `generate` runs whole.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any, Protocol

from granikv.errors import InvalidArgument
from granikv.sampling_params import SamplingParams

Answers = list[list[int]]
REGIMES = ("compute", "memory", "communication")


class Contender(Protocol):
    name: str
    vocab_size: int

    def near_tie(
        self, prompt: list[int], prefix_len: int, got: list[int], expected: list[int], share: float
    ) -> bool:
        """Whether the first difference is a gap below `share` of the logit range."""


class EngineContender:
    """An engine of ours in this process; its radix tree caches what prompts share.

    A round: `start`, `run` as often as liked, `finish`.
    """

    def __init__(
        self,
        name: str,
        beside: EngineContender | None = None,
        variant: str | None = None,
        **settings: Any,
    ):
        """settings: fields of EngineConfig. beside: its weights are used, not a copy: where their
        pages lie decides up to a tenth of a step's time. variant: of FixedDispatcher, to have no
        other choice."""
        from granikv.assembly import executor_beside
        from granikv.bench.fixed_dispatch import FixedDispatcher
        from granikv.config import EngineConfig
        from granikv.engine import Engine

        self.name = name
        config = EngineConfig(**settings)
        if beside is None or config.executor != "torch" or config.tp > 1:
            self.engine = Engine(config)
        else:
            other = beside.engine
            config, executor = executor_beside(config, other.tokenizer, other.executor.decoder)
            self.engine = Engine(config, executor=executor, tokenizer=other.tokenizer)
        if variant is not None:
            self.engine.dispatcher = FixedDispatcher(self.engine, variant)
        self.vocab_size = self.engine.model_config.vocab_size
        self.on_gpu = getattr(self.engine.executor, "on_gpu", False)
        self.dtype, self.tp = self.engine.config.dtype, self.engine.config.tp
        self.step_facts: dict[str, Any] = {}  # of the last round's steps
        self._next_id = 0
        self._answers: dict[str, list[int]] = {}

    def start(self, prompts: list[list[int]], num_steps: int) -> None:
        """All requests are cached and decode together; num_steps: tokens that `finish` gives."""
        self._generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
        params = SamplingParams(max_tokens=2 * num_steps, temperature=0.0, ignore_eos=True)
        self._answers = self._add(prompts, params)
        while not all(self._answers.values()):
            self._step(self._answers)
        self._step(self._answers)  # a step that was launched while the last prefill ran
        self.engine.settle()

    def run(self, num_steps: int) -> float:
        """Seconds of num_steps steps, of which each decodes every request."""
        before = dict(self.engine.counters)
        begin = time.perf_counter()
        made = sum(self._step(self._answers) for _ in range(num_steps))
        self.engine.settle()
        elapsed_s = time.perf_counter() - begin
        self._note_regime(before)
        expected = num_steps * len(self._answers)
        if made != expected:
            raise RuntimeError(f"{self.name}: expected {expected} tokens, got {made}")
        return elapsed_s

    def _note_regime(self, before: dict[str, float]) -> None:
        """What bound most of the steps since `before`, by the cost model."""
        made = {r: self.engine.counters[f"steps_{r}"] - before[f"steps_{r}"] for r in REGIMES}
        self.step_facts["regime"] = max(made, key=lambda regime: made[regime])

    def profile(self, num_steps: int) -> None:
        """The all-reduces' share of num_steps further steps; nothing without ranks or steps."""
        if self.tp == 1 or num_steps < 1 or self.engine.config.executor != "torch":
            return
        self.engine.executor.profile(True)
        elapsed_s = self.run(num_steps)
        self.step_facts["all_reduce_share"] = self.engine.executor.profile(False) / elapsed_s

    def finish(self, num_steps: int) -> Answers:
        """num_steps token ids per prompt, greedy."""
        for request_id in self._answers:
            self.engine.abort(request_id)
        while self.engine.has_work():
            self.engine.step()
        return [ids[:num_steps] for ids in self._answers.values()]

    def _add(self, prompts: list[list[int]], params: SamplingParams) -> dict[str, list[int]]:
        """Queue the prompts; returns request id -> the token ids to come."""
        answers: dict[str, list[int]] = {}
        for prompt in prompts:
            request_id = f"{self.name}-{self._next_id}"
            self._next_id += 1
            answers[request_id] = []
            self.engine.add_request(request_id, prompt, params)
        return answers

    def _generate(self, prompts: list[list[int]], params: SamplingParams) -> None:
        answers = self._add(prompts, params)
        while self.engine.has_work():
            self._step(answers)

    def _step(self, answers: dict[str, list[int]]) -> int:
        """One step; returns the tokens that it made."""
        if not self.engine.has_work():
            raise RuntimeError(f"{self.name}: requests ended before they all decoded together")
        outputs = self.engine.step()
        for out in outputs:
            if out.error is not None:
                raise out.error
            answers[out.request_id] += out.token_ids
        return sum(len(out.token_ids) for out in outputs)

    def near_tie(
        self, prompt: list[int], prefix_len: int, got: list[int], expected: list[int], share: float
    ) -> bool:
        return False  # only an independent reference may excuse a difference

    def close(self) -> None:
        self.engine.close()


class TransformersContender:
    """`generate` with a static cache over the batch; the shared prefix's KV is computed once."""

    name = "transformers"

    def __init__(self, model: str | None):
        import torch

        from granikv.bench.transformers_model import load_transformers
        from granikv.models.embedded import find_embedded

        path = Path(model) if model else find_embedded()
        if not path.exists():
            raise InvalidArgument("model", str(path), "an existing file or folder")
        self.torch = torch
        self.model: Any = load_transformers(path)
        self.model.generation_config.eos_token_id = None  # all requests decode all steps
        self.vocab_size = self.model.config.vocab_size
        self._prefix: tuple[list[int], Any] = ([], None)

    def _prefix_cache(self, prefix: list[int]) -> Any:
        """DynamicCache of one sequence; the last one is kept."""
        if self._prefix[0] != prefix or self._prefix[1] is None:
            with self.torch.inference_mode():
                out = self.model(self.torch.tensor([prefix]), use_cache=True, logits_to_keep=1)
            self._prefix = (prefix, out.past_key_values)
        return self._prefix[1]

    def _static_cache(self, prefix: list[int], batch: int, max_cache_len: int) -> Any:
        from transformers import StaticCache

        cache = StaticCache(config=self.model.config, max_cache_len=max_cache_len)
        if prefix:
            stored = self._prefix_cache(prefix)
            layers: list[Any] = cache.layers
            for layer, source in zip(layers, stored.layers, strict=True):
                keys, values = (x.expand(batch, -1, -1, -1) for x in (source.keys, source.values))
                layer.lazy_initialization(keys, values)
                layer.update(keys, values)
        return cache

    def decode(
        self, prompts: list[list[int]], prefix_len: int, num_steps: int
    ) -> tuple[float, Answers]:
        """(seconds per step, num_steps token ids per prompt), greedy.

        prefix_len: tokens that all prompts share, cached from call to call; 0 if none do.
        """
        from transformers import StoppingCriteriaList

        ids = self.torch.tensor(prompts)
        cache = self._static_cache(prompts[0][:prefix_len], ids.shape[0], ids.shape[1] + num_steps)
        times: list[float] = []

        def note_time(input_ids, scores, **kwargs):
            times.append(time.perf_counter())
            return self.torch.zeros(len(input_ids), dtype=self.torch.bool)

        with self.torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=num_steps,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([note_time]),
            )
        made = out[:, ids.shape[1] :].tolist()
        if len(times) != num_steps or len(made[0]) != num_steps:
            raise RuntimeError(f"transformers: expected {num_steps} steps, got {len(times)}")
        return (times[-1] - times[0]) / (num_steps - 1), made

    def near_tie(
        self, prompt: list[int], prefix_len: int, got: list[int], expected: list[int], share: float
    ) -> bool:
        at = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
        cache = copy.deepcopy(self._prefix_cache(prompt[:prefix_len])) if prefix_len else None
        ids = self.torch.tensor([(prompt + expected[:at])[prefix_len:]])
        with self.torch.inference_mode():
            out = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = out.logits[0, -1]
        gap = float((logits[expected[at]] - logits[got[at]]).abs())
        return gap < share * float(logits.max() - logits.min())
