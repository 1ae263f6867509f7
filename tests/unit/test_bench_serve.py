"""Workloads of the load test: exact lengths, sharing, traces. No server."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from granikv.bench.serve import same_answers
from granikv.bench.serve_workload import AgentsWorkload, TextMaker, TraceWorkload
from granikv.bench.workloads import Trace, TraceRequest
from granikv.errors import InvalidArgument, Unsupported
from granikv.serving.perf_analyzer import Samples

LETTERS = "abcdefgh"


class WordTokenizer:
    """Every word of three letters is a token; texts begin with a token of their own."""

    def __init__(self, num_words=400):
        made = itertools.islice(itertools.product(LETTERS, repeat=3), num_words)
        self.words = [" " + "".join(letters) for letters in made]
        self.vocab_size = len(self.words) + 1

    def decode(self, ids):
        return "".join("<s>" if i == 0 else self.words[i - 1] for i in ids)

    def encode(self, text):
        ids = [self.words.index(" " + word) + 1 for word in text.split()]
        return np.array([0, *ids], np.int32)


@pytest.fixture(scope="module")
def maker():
    return TextMaker(WordTokenizer())


def test_texts_have_exact_lengths(maker):
    workload = AgentsWorkload((3, 1), prefix_len=50, suffix_len=7, output_len=4, rounds=2)
    entries = workload.entries(maker, run=0)
    tokens = [WordTokenizer().encode(entry.text) for entry in entries]
    assert [len(t) for t in tokens] == [57] * 8 == [e.prompt_len for e in entries]
    assert entries[0].inputs()["max_tokens"] == 4 and entries[0].inputs()["end_id"] == -1
    heads = {tuple(t[:50]) for t in tokens}
    assert len(heads) == 2 and len({tuple(t) for t in tokens}) == 8


def test_runs_share_prefixes_and_nothing_else(maker):
    workload = AgentsWorkload((2,), prefix_len=20, suffix_len=5, output_len=2, rounds=1)
    first, second = workload.entries(maker, 0), workload.entries(maker, 1)
    assert first == workload.entries(maker, 0)
    assert not {e.text for e in first} & {e.text for e in second}
    head = first[0].text[: 19 * 4]
    assert all(e.text.startswith(head) for e in (*first, *second, *workload.warmup(maker)))


def test_a_trace_shares_what_its_blocks_share(maker):
    requests = (
        TraceRequest(0.0, 40, 9, (0, 1, 2), 0),
        TraceRequest(1.5, 45, 3, (0, 1, 3), 1),
        TraceRequest(2.0, 20, 3, (0, 1), 2),
    )
    workload = TraceWorkload(Trace("t", 16, requests), max_prompt_len=42, max_output_len=5)
    words = [entry.text.split() for entry in workload.entries(maker, 0)]
    assert [len(w) for w in words] == [40, 42, 20]
    assert words[0][:32] == words[1][:32] and words[0][32:] != words[1][32:40]
    assert words[2] == words[0][:20]
    assert [e.output_len for e in workload.entries(maker, 0)] == [5, 3, 3]
    assert workload.timestamps_s == (0.0, 1.5, 2.0)
    assert words[0][:16] != workload.entries(maker, 1)[0].text.split()[:16]


def test_bad_descriptions_and_vocabularies_are_errors():
    for wrong in ({"group_sizes": ()}, {"group_sizes": (0,)}, {"rounds": 0}, {"output_len": 1}):
        with pytest.raises(InvalidArgument):
            AgentsWorkload(**wrong)
    with pytest.raises(Unsupported, match="words of one token"):
        TextMaker(WordTokenizer(10))


def test_same_answers_compares_by_prompt():
    ours = Samples(answers=[("a", "1"), ("b", "2"), ("c", "3")])
    other = Samples(answers=[("b", "2"), ("a", "9")])
    assert same_answers(ours, other) == 0.5
