"""The decoder against transformers, and every way a model file can be wrong."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers import TINY_VOCAB, dense_attend, make_tiny_hf  # noqa: E402

from granikv.errors import InvalidArgument, ModelFileError, Unsupported  # noqa: E402
from granikv.models import ARCHITECTURES, check_weights, embedded, load_model  # noqa: E402
from granikv.models.gguf_loader import GGUFFile, unpermute_rows  # noqa: E402

TOLERANCE = 1e-3
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}


def relative_error(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def compare(folder, num_tokens=40):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    ids = torch.randint(0, TINY_VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    model = load_model(folder)
    attend = dense_attend(model.config)
    got = model.forward(ids, torch.arange(num_tokens), attend, None)
    assert got.dtype == torch.float32 and got.shape == (num_tokens, TINY_VOCAB)
    assert relative_error(got, expected) < TOLERANCE
    rows = torch.tensor([num_tokens - 1, 3])
    few = model.forward(ids, torch.arange(num_tokens), attend, rows)
    assert relative_error(few, expected[rows]) < TOLERANCE


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_equal_transformers(tmp_path, arch):
    compare(make_tiny_hf(tmp_path, arch, seed=1))


@pytest.mark.parametrize("rope", [LLAMA3, LINEAR], ids=["llama3", "linear"])
def test_rope_scaling_equals_transformers(tmp_path, rope):
    compare(make_tiny_hf(tmp_path, rope_parameters=rope), num_tokens=200)


def test_tied_embeddings_and_old_config_keys(tmp_path):
    folder = make_tiny_hf(tmp_path, tie_word_embeddings=True)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(folder)
    assert model.lm_head.weight is model.embedding  # one copy: too small to be packed
    compare(folder)


def test_sharded_index(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = make_tiny_hf(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({x: tensors[x] for x in part}, folder / f"part-{number}.safetensors")
        weight_map |= {x: f"part-{number}.safetensors" for x in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    compare(folder)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(ModelFileError, match="part-1.safetensors.*missing"):
        load_model(folder)


def test_headers_alone_tell_of_missing_and_misshapen_tensors(tmp_path, monkeypatch):
    from safetensors.torch import load_file, save_file

    folder = make_tiny_hf(tmp_path)
    monkeypatch.setattr("granikv.models.weights._Shards.get", None)  # no values are read
    check_weights(folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name][:, :5].contiguous()}, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=f"{name}: expected shape .*48, 80.* got .*48, 5"):
        check_weights(folder)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=f"{name} .*missing"):
        check_weights(folder)


def test_rows_of_several_sequences_in_one_step(tmp_path):
    model = load_model(make_tiny_hf(tmp_path, "Qwen3ForCausalLM"))
    ids = torch.arange(9)
    one = model.forward(ids, torch.arange(9), dense_attend(model.config))
    both = model.forward(
        torch.cat([ids[:4], ids]),
        torch.cat([torch.arange(4), torch.arange(9)]),
        dense_attend(model.config, [4, 9]),
    )
    torch.testing.assert_close(both[4:], one, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(both[:4], one[:4], rtol=1e-4, atol=1e-5)


def test_bfloat16_is_as_close_as_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = make_tiny_hf(tmp_path)
    ids, positions = torch.arange(12), torch.arange(12)
    full, half = load_model(folder), load_model(folder, torch.bfloat16)
    exact = full.forward(ids, positions, dense_attend(full.config))
    ours = half.forward(ids, positions, dense_attend(half.config))
    reference = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        theirs = reference(ids[None]).logits[0].float()
    assert ours.dtype == torch.float32
    assert relative_error(ours, exact) <= 2 * relative_error(theirs, exact)


# --- refusals ---------------------------------------------------------------------------------


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("arch", "changes", "match"),
    [
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 64,
                              "layer_types": ["full_attention", *["sliding_attention"] * 2]},
         "sliding_window=64 in 2 of 3 layers"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act"),
        ("LlamaForCausalLM", {"mlp_bias": True}, "mlp_bias"),
        ("Qwen3ForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("LlamaForCausalLM", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)  # fmt: skip
def test_unserved_settings_are_refused(tmp_path, arch, changes, match):
    folder = make_tiny_hf(tmp_path, arch)
    edit_config(folder, **changes)
    with pytest.raises(Unsupported, match=match):
        load_model(folder)


def test_unknown_architecture_lists_the_known(tmp_path):
    folder = make_tiny_hf(tmp_path)
    edit_config(folder, architectures=["GPT2LMHeadModel"])
    with pytest.raises(ModelFileError, match="GPT2LMHeadModel") as caught:
        load_model(folder)
    assert all(name in str(caught.value) for name in ARCHITECTURES)


def test_broken_hf_folders(tmp_path):
    good = make_tiny_hf(tmp_path / "good")

    def copy(name):
        return Path(shutil.copytree(good, tmp_path / name))

    with pytest.raises(ModelFileError, match="nowhere"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFileError, match="config.json"):
        load_model(tmp_path / "empty")
    folder = copy("json")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match="config.json: expected valid JSON"):
        load_model(folder)
    folder = copy("weights")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="safetensors"):
        load_model(folder)
    for keep in (0, 5, 900, -100):
        folder = copy(f"cut{keep}")
        content = (good / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[:keep])
        with pytest.raises(ModelFileError, match="model.safetensors.*truncated"):
            load_model(folder)
    folder = copy("layers")
    edit_config(folder, num_hidden_layers=4)
    with pytest.raises(ModelFileError, match=r"layers\.3\..*missing"):
        load_model(folder)
    folder = copy("shape")
    edit_config(folder, intermediate_size=81)
    with pytest.raises(ModelFileError, match=r"gate_proj.*expected shape \[81, 48\]"):
        load_model(folder)
    folder = copy("key")
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match="hidden_size"):
        load_model(folder)


# --- the embedded model -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_path():
    try:
        return embedded.find_embedded()
    except ModelFileError as error:
        pytest.skip(str(error))


def test_unpermute_inverts_the_conversion():
    weight = torch.arange(2 * 8 * 3).reshape(16, 3).float()
    permuted = weight.reshape(2, 2, 4, 3).swapaxes(1, 2).reshape(16, 3)  # as the converter does
    assert torch.equal(unpermute_rows(permuted, 2), weight)


def transformers_model(path):
    """transformers' Llama with the file's tensors, read by the gguf package, not by ours."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
    }
    names |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}
    names |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    state = {}
    for tensor in GGUFReader(str(path)).tensors:
        value = dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[-2] in ("attn_q", "attn_k"):
            heads, width = value.shape[0] // 64, value.shape[1]
            value = value.reshape(heads, 32, 2, width).swapaxes(1, 2).reshape(-1, width)
        prefix = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
        state[f"{prefix}{names[parts[-2]]}.weight"] = torch.from_numpy(value.copy())
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def test_embedded_logits_equal_transformers(gguf_path):
    reference = transformers_model(gguf_path)
    ids = torch.tensor([1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 2, 198, 1])
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    model = load_model()
    got = model.forward(ids, torch.arange(len(ids)), dense_attend(model.config))
    assert relative_error(got, expected) < TOLERANCE
    assert model.config.eos_token_ids == (2,) and model.config.max_position == 8192


def test_embedded_answers(gguf_path):
    from granikv.text import load_tokenizer

    model, tokenizer = load_model(), load_tokenizer()
    prompt = "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.from_numpy(tokenizer.encode(prompt)).long()
    attend = dense_attend(model.config)
    for _ in range(9):
        last = torch.tensor([len(ids) - 1])
        token = model.forward(ids, torch.arange(len(ids)), attend, last).argmax(-1)
        if token.item() in tokenizer.eos_token_ids:
            break
        ids = torch.cat([ids, token])
    assert tokenizer.decode(ids.tolist()).endswith("The answer is 4.")


def test_broken_gguf_files(tmp_path, gguf_path):
    head = gguf_path.read_bytes()[:3_000_000]
    path = tmp_path / "broken.gguf"
    for content, match in (
        (b"", "expected a GGUF file"),
        (b"not a model at all", "magic"),
        (head[:4], "truncated or corrupt"),
        (head[:100], "truncated or corrupt"),
        (head[:1_000_000], "truncated or corrupt"),
        (head, "truncated; download it again"),
        (head[:4] + b"\x09\0\0\0" + head[8:100], "version 2 or 3, got 9"),
        (head[:24] + b"\xff" * 8 + head[32:], "truncated or corrupt"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match=match) as caught:
            load_model(path)
        assert "broken.gguf" in str(caught.value)


def test_gguf_of_an_unknown_architecture(tmp_path, gguf_path):
    content = gguf_path.read_bytes()
    at = content.index(b"llama", 24)
    path = tmp_path / "other.gguf"
    path.write_bytes(content[:at] + b"mamba" + content[at + 5 :])
    with pytest.raises(ModelFileError, match="'mamba'"):
        load_model(path)


def test_gguf_header_reader(gguf_path):
    file = GGUFFile(gguf_path)
    assert len(file.tensors) == 272 and len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert file.tensors["blk.0.ffn_down.weight"].shape == (576, 1536)


def test_embedded_search_and_verification(tmp_path, monkeypatch, gguf_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(embedded.MODEL_DIR_VARIABLE, str(tmp_path))
    with pytest.raises(InvalidArgument, match=embedded.MODEL_DIR_VARIABLE):
        embedded.find_embedded()
    copy = tmp_path / embedded.FILE_NAME
    copy.write_bytes(b"short")
    with pytest.raises(ModelFileError, match="bytes"):
        embedded.find_embedded()
    content = bytearray(gguf_path.read_bytes())
    copy.write_bytes(content)
    assert embedded.find_embedded() == copy
    assert (tmp_path / "home" / ".cache" / "granikv" / "verified.json").exists()
    content[-1] ^= 1
    copy.write_bytes(content)
    with pytest.raises(ModelFileError, match="SHA-256"):
        embedded.find_embedded()
