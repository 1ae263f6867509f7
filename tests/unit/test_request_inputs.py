"""Refusals in the words of the client: the names of its inputs, not of the engine's fields."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from granikv.bench.host import NullExecutor
from granikv.config import EngineConfig, ModelConfig
from granikv.engine import Engine
from granikv.errors import AlreadyExists, InvalidArgument, Quantity, Unsupported, shown
from granikv.sampling_params import SamplingParams
from granikv.serving.request_inputs import (
    INPUT_NAMES,
    in_client_words,
    is_stop,
    read_id,
    read_row,
)


def row(**values):
    tensors = {"text_input": np.array([[b"a"]], object), "max_tokens": np.array([[1]])}
    return read_row(
        tensors
        | {k: np.array([[v]], object if isinstance(v, bytes) else None) for k, v in values.items()},
        0,
        True,
    )


@pytest.mark.parametrize(
    ("field", "prompt", "name"),
    [
        ("prompt", "text", "text_input"),
        ("prompt", [1, 2], "input_ids"),
        ("prompt token id", [1, 2], "input_ids"),
        ("stop_token_ids", "text", "end_id"),
        ("bad_words_ids", "text", "bad_words"),
        ("max_tokens", "text", "max_tokens"),
    ],
)
def test_a_refusal_of_the_engine_names_the_input(field, prompt, name):
    error = in_client_words(InvalidArgument(field, 7, "at most 3"), prompt)
    assert str(error) == f"{name}: expected at most 3, got 7"


def test_the_engine_refuses_with_the_fields_that_are_translated():
    model = ModelConfig("llama", 2, 64, 64, 4, 2, 16, 32000, 4096)
    config = EngineConfig(capacity_tokens=512, max_seq_len=64, profile="default")
    engine = Engine(config, executor=NullExecutor(model))
    for name, prompt, params in (
        ("prompt", [1] * 64, SamplingParams(max_tokens=1)),
        ("prompt token id", [32000], SamplingParams(max_tokens=1)),
        ("stop_token_ids", [1], SamplingParams(max_tokens=1, stop_token_ids=(32000,))),
        ("bad_words_ids", [1], SamplingParams(max_tokens=1, bad_words_ids=((32000,),))),
    ):
        with pytest.raises(InvalidArgument) as caught:
            engine.add_request("r", prompt, params)
        assert caught.value.name == name and name in INPUT_NAMES
    engine.close()


def test_end_id():
    assert row(end_id=-1).sampling["ignore_eos"] is True
    assert row(end_id=0).sampling["stop_token_ids"] == [0]
    with pytest.raises(InvalidArgument, match="end_id.*-1 for none, got -2"):
        row(end_id=-2)


@pytest.mark.parametrize("name", ["beam_width", "num_return_sequences"])
def test_numbers_of_sequences(name):
    assert row(**{name: 1}).text == "a"
    with pytest.raises(Unsupported, match=name):
        row(**{name: 2})
    for value in (0, -1):
        with pytest.raises(InvalidArgument, match=f"{name}: expected 1.*got {value}"):
            row(**{name: value})


@pytest.mark.parametrize("name", ["stop_words", "bad_words"])
def test_words_are_bounded_in_number_and_length(name):
    def words(*texts):
        tensors = {"text_input": np.array([[b"a"]], object), "max_tokens": np.array([[1]])}
        return read_row(tensors | {name: np.array([texts], object)}, 0, True)

    words(*[b"w"] * 256)
    words(b"w" * 1024)
    with pytest.raises(InvalidArgument, match=f"{name}: expected at most 256 words, got 257"):
        words(*[b"w"] * 257)
    words(*[b"w" * 64] * 256)
    with pytest.raises(InvalidArgument, match=f"{name}.*at most 16384 bytes in all.*got 16448 "):
        words(*[b"w" * 64] * 255, b"w" * 128)
    with pytest.raises(InvalidArgument, match=f"{name}.*at most 1024 bytes.*got 1026 bytes"):
        words("é".encode() * 513)


@pytest.mark.parametrize("name", ["cache_salt", "prefix_id", "id"])
def test_names_are_bounded(name):
    def read(value: bytes):
        if name != "id":
            return row(**{name: value})
        return read_id(SimpleNamespace(request_id=value.decode))

    read(b"n" * 1024)
    with pytest.raises(InvalidArgument, match=f"^{name}: expected at most 1024 bytes.*1026 bytes$"):
        read("é".encode() * 513)
    with pytest.raises(InvalidArgument, match=f"^{name}: expected valid UTF-8 .byte 2 is not"):
        read(b"ok\xff\xfe")


def test_a_stop_is_for_all_rows():
    def stops(*values):
        return is_stop({"stop": np.array([[value] for value in values])})

    assert stops(True) and stops(True, True)
    assert not stops(False, False) and not is_stop({})
    with pytest.raises(InvalidArgument, match=r"stop: .*same in every row, got \[False, True\]"):
        stops(False, True)


def test_errors_show_the_start_and_the_length_of_a_long_value():
    for value, length in (
        ("x" * 30_000_000, "30000000 characters"),
        (b"\xff" * 5000, "5000 bytes"),
        ({"k": "x" * 5000}, "5009 characters"),
        ([b"x" * 5000] * 9, "5000 bytes"),
    ):
        text = str(InvalidArgument("field", value, "less"))
        assert text.startswith("field: expected less, got ") and length in text
        assert len(text) < 600
    assert shown([1, 2, 3, 4, 5]) == "[1, 2, 3, 4, ... (5 values)]"
    for value in ("x" * 100, b"\xff", 7, None, [1, "a"], Quantity("9 tokens")):
        assert shown(value) == repr(value)
    with pytest.raises(Unsupported, match="guided_decoding_guide=.*4000000 bytes") as caught:
        row(guided_decoding_guide=b"x" * 4_000_000)
    assert len(str(caught.value)) < 300
    error = pickle.loads(pickle.dumps(AlreadyExists("x" * 9999)))
    assert len(str(error)) < 300 and "9999 characters" in str(error)
