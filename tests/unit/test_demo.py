"""The demo's reference: the same answers with any guess, in few passes, and a file parsed once."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
import transformers
from rich.console import Console

from granikv.bench import transformers_model
from granikv.demo import main, runner
from granikv.demo.reference import Reference
from granikv.demo.runner import Response, counters_of
from granikv.errors import Unavailable
from tests.helpers import TINY_VOCAB, make_tiny_hf

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
SHARED, PROMPT = "3 14 15 92", "3 14 15 92 65 35 8"
NUM_TOKENS = 12


class NumberTokenizer:
    """A text is its token ids."""

    eos_token_ids = (2,)

    def encode(self, text: str) -> np.ndarray:
        return np.array([int(word) for word in text.split()], np.int32)

    def decode(self, ids) -> str:
        return " ".join(map(str, ids))


class Counted:
    """The model, with the number of its passes."""

    def __init__(self, model):
        self.model, self.num_passes = model, 0

    def __call__(self, *arguments, **options):
        self.num_passes += 1
        return self.model(*arguments, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_tiny_hf(tmp_path_factory.mktemp("tiny"))
    return transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)


@pytest.fixture(scope="module")
def expected(model) -> list[int]:
    """By a forward pass over the whole text for every token."""
    ids = [int(word) for word in PROMPT.split()]
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    answer = ids[-NUM_TOKENS:]
    assert 2 not in answer, "choose another seed: the answer should not end early"
    return answer


def text(ids: list[int]) -> str:
    return NumberTokenizer().decode(ids)


def test_a_right_guess_takes_one_pass(model, expected):
    counted = Counted(model)
    reference = Reference(counted, NumberTokenizer(), SHARED)
    counted.num_passes = 0
    assert reference.greedy(PROMPT, NUM_TOKENS, draft=text(expected)) == expected
    assert counted.num_passes == 1


@pytest.mark.parametrize("right", [0, 1, 5, 11])
def test_the_answer_is_the_same_with_any_guess(model, expected, right):
    reference = Reference(model, NumberTokenizer(), SHARED)
    wrong = (expected[right] + 1) % TINY_VOCAB
    for guess in (expected[:right], [*expected[:right], wrong, 5, 6, 7]):
        assert reference.greedy(PROMPT, NUM_TOKENS, draft=text(guess)) == expected
    longer = [*expected, 7, 7]
    assert reference.greedy(PROMPT, right, draft=text(longer)) == expected[:right]


def test_an_answer_stops_before_the_end_token(model, expected):
    tokenizer = NumberTokenizer()
    tokenizer.eos_token_ids = (expected[4],)
    until_end = expected[: expected.index(expected[4])]
    reference = Reference(model, tokenizer, SHARED)
    for guess in ([], until_end, expected):
        assert reference.greedy(PROMPT, NUM_TOKENS, draft=text(guess)) == until_end


def test_different_texts_of_the_same_tokens_are_no_near_tie(model, expected):
    reference = Reference(model, NumberTokenizer(), SHARED)
    assert reference.relative_gap(PROMPT, text(expected), text(expected) + " ") == 1.0
    other = [*expected[:3], (expected[3] + 1) % TINY_VOCAB]
    assert 0.0 < reference.relative_gap(PROMPT, text(expected), text(other)) < 1.0


def test_every_checked_answer_is_a_line_and_a_wrong_one_a_difference(model, expected, monkeypatch):
    agents = (SimpleNamespace(name="a", max_tokens=3), SimpleNamespace(name="b", max_tokens=2))
    monkeypatch.setattr(main, "AGENTS", agents)
    wrong = [expected[0], (expected[1] + 1) % TINY_VOCAB]
    answers = [Response("a", 0, PROMPT, text(expected[:3])), Response("b", 0, PROMPT, text(wrong))]
    failed = Response("b", 1, PROMPT, error="UNAVAILABLE")
    lines = io.StringIO()
    differences = main.compare_with_transformers(
        SimpleNamespace(responses=[*answers, failed]),
        Reference(model, NumberTokenizer(), SHARED),
        Console(file=lines),
    )
    (difference,) = differences
    assert difference.agent == "b" and difference.expected == text(expected[:2])
    assert not difference.near_tie and difference.logit_gap > 0
    assert "transformers: 1/2 answers checked" in lines.getvalue()
    assert "transformers: 2/2 answers checked" in lines.getvalue()


def test_the_gguf_file_is_parsed_once_and_gguf_is_left_as_it_was():
    originals = gguf.GGUFReader, gguf.get_tensor_name_map
    with transformers_model._gguf_parsed_once():
        tables = [gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) for _ in range(2)]
        assert tables[0] is tables[1]
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == originals


def test_only_this_process_gets_sleeping_threads():
    script = (
        "import os\n"
        "from granikv.demo.reference import import_torch_with_sleeping_threads\n"
        "import_torch_with_sleeping_threads()\n"
        "assert 'OMP_WAIT_POLICY' not in os.environ\n"
    )
    report = subprocess.run(
        [sys.executable, "-c", script],
        env={"OMP_DISPLAY_ENV": "true", "PATH": ""},
        cwd=transformers_model.__file__.partition("/granikv/bench")[0],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert report.returncode == 0, report.stderr
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in report.stderr


def test_an_interrupt_does_not_wait_for_the_streams(monkeypatch):
    server_is_there, begun = threading.Event(), threading.Event()

    def stream(*arguments, **options) -> Response:
        begun.set()
        server_is_there.wait(60)
        return Response("", 0, "")

    monkeypatch.setattr(runner, "stream", stream)
    agents = runner.conversations(2)
    interrupt = threading.Thread(
        target=lambda: (begun.wait(30), os.kill(os.getpid(), signal.SIGINT))
    )
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job may ignore it
    interrupt.start()
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt), runner.Progress() as progress:
            runner.drive("", agents, 3, progress, "a layout")
        assert time.monotonic() - begin < 20  # 60 where the workers are waited for
    finally:
        signal.signal(signal.SIGINT, handler)
        server_is_there.set()
        interrupt.join()


def test_two_demos_do_not_write_one_report(tmp_path):
    folder = tmp_path / "demo"
    with main.only_demo_in(folder):
        with pytest.raises(Unavailable, match="another demo writes"):
            main.run_demo(True, folder, Console(file=io.StringIO()))
        with main.only_demo_in(tmp_path / "another"):
            pass
    with main.only_demo_in(folder):
        pass


def test_only_counters_can_be_subtracted():
    """A gauge's difference says nothing, and buckets of one histogram are not to be summed."""
    text = """# HELP nv_granikv_steps Steps
# TYPE nv_granikv_steps counter
nv_granikv_steps{model="granikv",version="1"} 7
nv_granikv_steps{model="granikv",version="2"} 2
# TYPE nv_granikv_free_tokens gauge
nv_granikv_free_tokens 12
# TYPE nv_granikv_inter_token_latency_seconds_bucket counter
nv_granikv_inter_token_latency_seconds_bucket{le="0.1"} 3
# TYPE nv_granikv_never counter
"""
    assert counters_of(text) == {"nv_granikv_steps": 9.0, "nv_granikv_never": 0.0}
