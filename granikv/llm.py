"""The offline API: `LLM(model).generate(prompts, params)`, as vLLM and TensorRT-LLM users know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from granikv.config import EngineConfig
from granikv.core import FinishReason
from granikv.engine import Engine
from granikv.errors import GraniKVError, InvalidArgument
from granikv.sampling_params import SamplingParams

Prompt = str | Sequence[int] | np.ndarray


@dataclass
class CompletionOutput:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    error: Exception | None = None


@dataclass
class GenerationResult:
    """One prompt's result; a prompt that was refused has `outputs[0].error`."""

    request_id: str
    prompt: Prompt
    outputs: list[CompletionOutput]
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


class LLM:
    """`model`: a GGUF file, a Hugging Face folder, or None for the embedded model."""

    def __init__(self, model: str | Path | None = None, **engine_config: Any):
        self.engine = Engine(EngineConfig(model=model, **engine_config))
        self._next_id = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[GenerationResult]:
        """Generate for one prompt or many; results are in the order of the prompts."""
        many = _as_prompts(prompts)
        params = _as_params(sampling_params, len(many))
        results: dict[str, GenerationResult] = {}
        for prompt, one in zip(many, params, strict=True):
            request_id = f"llm-{self._next_id}"
            self._next_id += 1
            result = results[request_id] = GenerationResult(
                request_id, prompt, [CompletionOutput()]
            )
            try:
                self.engine.add_request(request_id, prompt, one)
            except GraniKVError as error:
                result.outputs[0].error = error
                result.outputs[0].finish_reason = FinishReason.ERROR
        self._run(results, use_tqdm)
        return list(results.values())

    def _run(self, results: dict[str, GenerationResult], show_progress: bool) -> None:
        from rich.progress import Progress

        with Progress(disable=not show_progress) as progress:
            task = progress.add_task("generating", total=len(results))
            while self.engine.has_work():
                for out in self.engine.step():
                    result = results.get(out.request_id)
                    if result is None:
                        continue
                    completion = result.outputs[0]
                    completion.text += out.text
                    completion.token_ids += out.token_ids
                    completion.logprobs += out.logprobs
                    completion.cumulative_logprob = out.cum_logprob
                    result.num_prompt_tokens = out.num_prompt_tokens
                    result.num_cached_tokens = out.num_cached_tokens
                    if out.finished:
                        completion.finish_reason, completion.error = out.finish_reason, out.error
                        progress.advance(task)

    def chat(
        self,
        messages: list[dict[str, str]],
        sampling_params: SamplingParams | None = None,
    ) -> GenerationResult:
        """One answer to a list of {"role", "content"} messages, through the chat template."""
        assert self.engine.tokenizer is not None
        prompt = self.engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return self.generate(prompt, sampling_params)[0]

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | np.ndarray):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidArgument("sampling_params", len(params), f"one, or {count}: one per prompt")
    return list(params)
