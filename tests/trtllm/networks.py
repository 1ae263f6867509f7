"""Builds the network of one rank as trtllm-build does, on the stand-ins."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from granikv.engines.io import BuildLimits

API = json.loads((Path(__file__).parent / "api.json").read_text())


def load(trtllm, folder: Path, rank: int):
    """The rank's model with its weights, as `trtllm-build --checkpoint_dir` makes it."""
    config = trtllm.config.from_json_file(str(folder / "config.json"))
    config.set_rank(rank)
    return trtllm.models.MODEL_MAP[config.architecture].from_checkpoint(str(folder), config=config)


def arguments(limits: BuildLimits, **changes) -> dict:
    """What trtllm-build passes to prepare_inputs for a build with these limits."""
    given = {
        "max_batch_size": limits.max_requests,
        "max_input_len": min(1024, limits.max_seq_len),
        "max_seq_len": limits.max_seq_len,
        "use_cache": True,
        "max_beam_width": 1,
        # trtllm-build's own checks: no more than all sequences, no less than one block
        "max_num_tokens": max(min(limits.max_tokens, limits.max_requests * limits.max_seq_len), 32),
        "opt_num_tokens": limits.max_requests,
        "prompt_embedding_table_size": 0,
        "max_draft_len": 0,
        "speculative_decoding_draft_tokens_external": False,
        "gather_context_logits": False,
        "lora_target_modules": [],
    } | changes
    if not changes:
        assert list(given) == API["prepare_inputs_keywords"]["keywords"]
    return given


def build(trtllm, model, feeds=None):
    """(TensorRT's network, TensorRT-LLM's) after prepare_inputs and forward."""
    network = trtllm.trt.INetworkDefinition(feeds)
    wrapper = trtllm.common.Network(network)
    trtllm.common.set_network(wrapper)
    try:
        model(**model.prepare_inputs(**arguments(model.limits)))
    finally:
        trtllm.common.set_network(None)
    return network, wrapper


@dataclass
class Session:
    """Runs a rank's network on the stand-ins where an ONNX session would run."""

    trtllm: object
    model: object

    def run(self, _, feeds):
        tensors = {name: torch.from_numpy(x) for name, x in feeds.items()}
        network, _ = build(self.trtllm, self.model, tensors)
        return [network.outputs[0].value.numpy()]
