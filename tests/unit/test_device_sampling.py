"""The sampler whose state is on the device: the host sampler's results, and never a wait for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_executor import PROMPT, SLOTS, make_plan
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from granikv import device_sampling
from granikv.config import EngineConfig, ModelConfig
from granikv.core import Move, NewRow
from granikv.device_sampling import DeviceSampler
from granikv.errors import InvalidArgument
from granikv.executor.device_executor import DeviceExecutor
from granikv.penalty_counts import FIRST_ROWS, PenaltyCounts
from granikv.sampling import CPU, Sampler
from granikv.sampling_params import SamplingParams
from granikv.transfers import to_device

VOCAB, ROWS, EOS = 40, 12, (2,)
WORDS = ((3,), (4, 5), (5, 5), (1, 2, 4, 6), (7, 8), (8, 7), (9, 4), (4, 4), (6, 4))
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 0},
    {"seed": 1, "temperature": 0.8},
    {"top_k": 7, "logprobs": 3},
    {"seed": 2**64 - 1, "top_p": 0.7},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7, "seed": 4},
    {"temperature": 0.0, "repetition_penalty": 1.6},
    {"temperature": 0.0, "frequency_penalty": 0.7},
    {"presence_penalty": 1.5, "frequency_penalty": -0.4, "seed": 9, "top_k": 3, "logprobs": 20},
    {"temperature": 0.0, "bad_words_ids": WORDS},
    {"seed": 3, "min_tokens": 6, "max_tokens": 99, "stop_token_ids": (0, 1, 4)},
    {"temperature": 0.0, "min_tokens": 2, "bad_words_ids": ((2, 2, 2),), "presence_penalty": 2.0},
    {"seed": 5, "bad_words_ids": tuple((i,) for i in range(VOCAB)), "repetition_penalty": 0.3},
]


class Twins:
    """The host's and the device's sampler with the same requests."""

    def __init__(self, rows=ROWS, seed=0):
        self.host = Sampler(rows, VOCAB, seed_default=7, eos_token_ids=EOS)
        self.device = self.host.on(CPU)
        self.random = np.random.default_rng(seed)
        self.made: dict[int, tuple] = {}  # by row: kind, prompt, output

    def put(self, row, kind, prompt, output=()):
        self.made[row] = (kind, prompt, list(output))
        for sampler in (self.host, self.device):
            params = SamplingParams(**KINDS[kind])
            sampler.set_request(row, params, np.array(prompt, np.int32), tuple(output), f"r{kind}")

    def step(self, rows, logits):
        """The device's output, compared with the host's."""
        positions = [len(self.made[row][2]) for row in rows]
        want = self.host.sample(logits, rows, positions)
        got = self.device.launch(logits, np.array(rows), np.array(positions)).output()
        assert got.token_ids.tolist() == want.token_ids.tolist()
        assert got.token_ids.dtype == want.token_ids.dtype
        for name in ("logprobs", "top_logprobs", "top_ids"):
            a, b = getattr(got, name), getattr(want, name)
            assert (a is None) == (b is None), name
            if a is not None:
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-6, err_msg=name)
        for row, token in zip(rows, got.token_ids.tolist(), strict=True):
            self.made[row][2].append(token)
        return got


def logits_of(random, count):
    """Coarse, so that ties and repeated tokens are common; some rows are wild."""
    logits = torch.from_numpy(random.integers(-4, 5, (count, VOCAB)).astype(np.float32))
    logits[:, :10] += 3  # where the bad words and the ends are
    for row in range(count):
        if random.random() < 0.1:
            logits[row, random.integers(VOCAB)] = [np.inf, -np.inf, np.nan][random.integers(3)]
    return logits


@pytest.mark.parametrize("seed", range(2))
def test_results_are_the_host_samplers_through_joins_leaves_and_preemptions(seed, monkeypatch):
    """Rows are taken again by other requests and batches are ragged, in slices of any size."""
    twins = Twins(seed=seed)
    random = twins.random
    for step in range(45):
        monkeypatch.setattr(device_sampling, "SLICE_ROWS", int(random.integers(1, 14)))
        row = int(random.integers(ROWS))
        if row in twins.made and step % 3 == 0:  # preempted: it comes back on another row
            kind, prompt, output = twins.made.pop(row)
            twins.put(
                int(random.choice([r for r in range(ROWS) if r != row])), kind, prompt, output
            )
        else:
            prompt = random.integers(0, 10, random.integers(1, 6)).tolist()
            twins.put(row, int(random.integers(len(KINDS))), prompt)
        rows = [r for r in random.permutation(ROWS).tolist() if r in twins.made][:9]
        twins.step(rows, logits_of(random, len(rows)))
    assert sum(len(set(output)) > 3 for _, _, output in twins.made.values()) > 3


def test_every_kind_of_mask_and_penalty_changes_a_token():
    """So that the comparison with the twin compares something: a plain request does otherwise."""
    random = np.random.default_rng(1)
    logits = [logits_of(random, 1).nan_to_num(0, 0, 0) for _ in range(30)]

    def tokens(kind):
        twins = Twins()
        twins.put(0, kind, [4, 1, 2, 4])
        return [int(twins.step([0], x).token_ids[0]) for x in logits]

    plain = tokens(0)
    for kind in (6, 7, 9, 11):
        assert tokens(kind) != plain, KINDS[kind]
    ends = tokens(10)
    assert not {0, 1, 2, 4} & set(ends[:6]) and {0, 1, 2, 4} & set(ends[6:])


def test_a_second_depth_needs_no_ids_on_the_host():
    """Steps queued before any result is read give what one step at a time gives."""
    random = np.random.default_rng(2)
    logits = [logits_of(random, len(KINDS)) for _ in range(10)]
    rows = np.arange(len(KINDS))
    twins = Twins(len(KINDS))
    for row in rows.tolist():
        twins.put(row, row, [1, 4, 4])
    early = Sampler(len(KINDS), VOCAB, seed_default=7, eos_token_ids=EOS).on(CPU)
    for row, kind in enumerate(KINDS):
        early.set_request(row, SamplingParams(**kind), np.array([1, 4, 4]), (), f"r{row}")
    queued = [early.launch(x, rows, np.full(len(rows), i)) for i, x in enumerate(logits)]
    want = [twins.step(rows.tolist(), x).token_ids.tolist() for x in logits]
    assert [q.output().token_ids.tolist() for q in queued] == want


def test_a_longer_word_and_a_new_request_leave_other_rows_their_history():
    """The history becomes wider, and a row of an equal batch gets other words."""
    sampler = DeviceSampler(2, VOCAB, CPU)

    def put(row, *words):
        params = SamplingParams(temperature=0.0, bad_words_ids=words)
        sampler.set_request(row, params, np.array([6, 1]))

    def tokens(best):
        logits = torch.zeros(2, VOCAB)
        logits[:, best] = torch.tensor([2.0, 1.0])
        return (
            sampler.launch(logits, np.array([0, 1]), np.array([0, 0])).output().token_ids.tolist()
        )

    put(0, (1, 2))
    put(1, (9, 6, 1, 2))  # not made: 9
    assert tokens([2, 3]) == [3, 2]
    put(0, (3, 2))
    assert sampler._masks.history.shape == (2, 3) and tokens([2, 3]) == [2, 2]
    put(1, (2, 2), (4, 6, 1, 3), (6, 1, 2))
    assert tokens([2, 3]) == [2, 3] and tokens([2, 3]) == [2, 2]
    assert sampler._masks.history.tolist() == [[2, 2, 2], [1, 3, 2]]
    preempted = SamplingParams(temperature=0.0, bad_words_ids=((6, 1, 5, 2),))
    sampler.set_request(0, preempted, np.array([6, 1]), (5,))
    assert tokens([2, 3])[0] == 3


def test_counts_take_memory_only_for_rows_with_penalties():
    sampler = DeviceSampler(40, VOCAB, CPU)
    plain, penal = SamplingParams(temperature=0.0), SamplingParams(presence_penalty=1.0)
    for row in range(40):
        sampler.set_request(row, plain, np.array([1]))
    assert sampler._counts.table.shape == (0, VOCAB)
    for _ in range(3):  # rows that are taken again give theirs back
        for row in range(FIRST_ROWS):
            sampler.set_request(row, penal, np.array([1]))
    assert sampler._counts.table.shape == (FIRST_ROWS, VOCAB)
    for row in range(40):
        sampler.set_request(row, penal, np.array([1]))
    assert sampler._counts.table.shape == (40, VOCAB)  # the cap, not the next power of two
    sampler.set_request(0, plain, np.array([1]))
    sampler.set_request(1, penal, np.array([1]))


def test_counts_survive_growth_and_start_anew():
    counts = PenaltyCounts(FIRST_ROWS + 1, 5, CPU)
    first = counts.take(np.array([3, 3]), [1, 1, 4])
    for _ in range(FIRST_ROWS):
        counts.take(np.array([0]), [2])
    counts.add(torch.tensor([first]), torch.tensor([4]))
    seen, made = counts.of(torch.tensor([first]))
    assert seen.tolist() == [[False, True, False, True, True]]
    assert made.tolist() == [[0.0, 2.0, 0.0, 0.0, 2.0]]
    counts.release(first)
    assert counts.take(np.array([2]), []) == first
    assert counts.of(torch.tensor([first]))[0].tolist() == [[False, False, True, False, False]]


def test_what_the_host_sampler_refuses():
    sampler = DeviceSampler(2, VOCAB, CPU)
    sampler.set_request(0, SamplingParams(), np.array([1]))
    with pytest.raises(InvalidArgument, match="rows.*got 1"):
        sampler.launch(torch.zeros(2, VOCAB), np.array([0, 1]), np.array([0, 0]))
    for field in (
        {"bad_words_ids": ((VOCAB,),)},
        {"stop_token_ids": (-1,)},
        {"bad_words_ids": ((),)},
    ):
        with pytest.raises(InvalidArgument, match=next(iter(field))):
            sampler.set_request(1, SamplingParams(**field), np.array([1]))
    with pytest.raises(TypeError, match="float32"):
        to_device({"x": np.zeros(3, np.float32)}, CPU)


# --- no wait -----------------------------------------------------------------------------------


class NoWait(TorchDispatchMode):
    """The meta device in a GPU's place: it has no data, so whatever asks for some fails.

    Copies between it and the host must be asynchronous, and an operation has all of its tensors on
    one side: with an index on the other, torch copies that and waits. It does not see what torch
    makes out of Python's lists by itself; the test on a GPU does.
    """

    def __init__(self):
        super().__init__()
        self.sent = self.fetched = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # in inference mode, operations made of others come whole
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            if {target.device.type, source.device.type} == {"cpu", "meta"}:
                assert args[2:] == (True,) or kwargs.get("non_blocking"), "a copy that waits"
                self.fetched += source.device.type == "meta"
                return target
        elif func is torch.ops.aten._to_copy.default:
            crosses = str(kwargs.get("device", args[0].device)) != args[0].device.type
            assert not crosses or kwargs.get("non_blocking"), "a copy that waits"
            self.sent += crosses
        else:
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            sides = {x.device.type for x in tensors if x.dim() or x.device.type == "meta"}
            assert len(sides) < 2, f"{func}: tensors of both sides"
        return func(*args, **kwargs)


META = torch.device("meta")
MODEL = ModelConfig("llama", 2, 16, 16, 4, 2, 16, 2000, 64)  # more tokens than a first try sorts


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: x.cpu(), lambda x: x.nonzero(),
        lambda x: x[torch.tensor([0, 1])], lambda x: x[x > 0], lambda x: torch.tensor([1.0]).to(META),
        lambda x: x + torch.ones(3), lambda x: torch.zeros(3).copy_(x),
    ],
)  # fmt: skip
def test_the_double_sees_what_would_wait(wait):
    expected = pytest.raises((AssertionError, RuntimeError))
    with expected, torch.inference_mode(), NoWait():
        wait(torch.zeros(3, device=META))


class MetaExecutor(DeviceExecutor):
    """A device executor whose device has no data, with a model that gives logits without any."""

    def __init__(self, config):
        sampler = Sampler(config.max_requests, MODEL.vocab_size, eos_token_ids=EOS)
        super().__init__(config, MODEL, sampler, META)
        self.buffers = self  # nothing to prepare

    def prepare(self, plan, capture=False):
        pass

    def _forward(self, rows, num_rows, sample_rows):
        ids = self._input_ids(rows, num_rows)
        ids = ids if sample_rows is None else ids[sample_rows]
        return torch.zeros(len(ids), MODEL.vocab_size, device=META)


def test_a_step_is_launched_without_a_wait_for_any_kind_of_request():
    """Admission with moves, sampling and the next step, for every kind of request."""
    config = EngineConfig(capacity_tokens=64, max_requests=16, dtype="float32", max_seq_len=32)
    executor = MetaExecutor(config)
    for kind in KINDS:
        with NoWait() as mode:
            plan = make_plan(PROMPT, 0, SLOTS, range(9))  # more writes than rows
            plan.new_requests = [NewRow(5, "a", SamplingParams(**kind), np.array(PROMPT), (1, 2))]
            plan.moves = [Move(np.array([3, 4], np.int32), 30)]
            handles = [executor.launch(plan)]
            handles += [executor.launch(make_plan([-1], p, SLOTS, [p])) for p in (5, 6)]
        assert all(handle.error is None for handle in handles), handles
        wants = 4 if "logprobs" in kind else 1
        assert mode.fetched == 3 * wants and mode.sent >= 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's sync debug mode needs a GPU")
def test_a_gpu_is_not_synchronised_and_gives_the_hosts_ids():
    device = torch.device("cuda")
    host = Sampler(len(KINDS), VOCAB, eos_token_ids=EOS)
    sampler, rows = host.on(device), np.arange(len(KINDS))
    random = np.random.default_rng(3)
    logits = [logits_of(random, len(KINDS)).nan_to_num(0, 0, 0) for _ in range(8)]
    on_gpu = [x.to(device) for x in logits]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for row, kind in enumerate(KINDS):
            sampler.set_request(row, SamplingParams(**kind), np.array([1, 4]), (5,), f"r{row}")
        queued = [sampler.launch(x, rows, np.full(len(rows), 1 + i)) for i, x in enumerate(on_gpu)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for row, kind in enumerate(KINDS):
        host.set_request(row, SamplingParams(**kind), [1, 4], (5,), f"r{row}")
    for i, (got, x) in enumerate(zip(queued, logits, strict=True)):
        assert got.host_ids.is_pinned() and all(part.is_pinned() for part in got.host_logprobs)
        want = host.sample(x, rows.tolist(), [1 + i] * len(rows))
        assert got.output().token_ids.tolist() == want.token_ids.tolist()
        np.testing.assert_allclose(got.output().logprobs, want.logprobs, rtol=0, atol=1e-5)
