"""An executor without a model: it remembers which token of which sequence every slot holds.

A slot's content is a hash chain over the namespace and all tokens up to its position, so that one
comparison tells whether a span holds exactly the tokens that a row must see. The sampled token is
a function of that chain: it depends on the sequence alone, never on scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from granikv.config import EngineConfig, ModelConfig
from granikv.core import (
    ColdItem,
    Count,
    ExtendSegment,
    FinishReason,
    HotItem,
    SpanKind,
    StepOutput,
    StepPlan,
)
from granikv.engine import Engine
from granikv.errors import InvalidArgument
from granikv.sampling_params import SamplingParams

VOCAB = 32
NOTHING = -1  # content of a slot that no step has written


def chain(salt: int, tokens) -> list[int]:
    """Content of each position of a sequence."""
    made, last = [], hash((salt, 7))
    for token in tokens:
        last = hash((last, int(token)))
        made.append(last)
    return made


def next_token(content: int) -> int:
    """Few distinct values, so that outputs of different requests often agree for a while."""
    return 3 + (content >> 7) % 3


def model_config() -> ModelConfig:
    return ModelConfig(
        "LlamaForCausalLM", num_layers=1, hidden_size=8, intermediate_size=8, num_qo_heads=2,
        num_kv_heads=1, head_dim=4, vocab_size=VOCAB, max_position=256,
    )  # fmt: skip


@dataclass
class _Step:
    plan: StepPlan
    output: StepOutput | None = None
    error: Exception | None = None


def _named_slots(plan: StepPlan) -> set[int]:
    """Slots that a plan names itself: not those it finds through request_slots."""
    named = set(plan.slot_mapping.tolist())
    for start, length in plan.hot_items[:, [HotItem.KV_START, HotItem.KV_LEN]].tolist():
        named.update(range(start, start + length))
    for move in plan.moves:
        named.update(move.src_slots.tolist(), range(move.dst_start, move.dst_start + move.length))
    return named


class ShadowExecutor:
    """is_late: steps run when they are waited for, else at launch; a real device is in between.

    failing: ids of steps that raise after their moves and appends were lost.
    """

    def __init__(self, config: EngineConfig, *, is_late: bool, failing: frozenset[int]):
        self.decoder = SimpleNamespace(config=model_config())
        self.salts: dict[str, int] = {}  # by request id
        self._is_late, self._failing = is_late, failing
        self._padding = config.capacity_tokens - 1
        self._arena = np.full(config.capacity_tokens, NOTHING, np.int64)
        self._slots = np.full((config.max_requests, config.max_seq_len), 2**30, np.int32)
        self._chains: dict[int, list[int]] = {}  # by row
        self._broken: set[int] = set()  # rows of a failed step, until they are given anew
        self._queue: list[_Step] = []

    def launch(self, plan: StepPlan) -> _Step:
        step = _Step(plan)
        targets = {s for m in plan.moves for s in range(m.dst_start, m.dst_start + m.length)}
        for older in self._queue:
            assert not targets & _named_slots(older.plan), "an older step still needs these slots"
        self._queue.append(step)
        if not self._is_late:
            self._run_until(step)
        return step

    def wait(self, step: _Step) -> StepOutput:
        self._run_until(step)
        if step.error is not None:
            raise step.error
        assert step.output is not None
        return step.output

    def close(self) -> None:
        """Nothing to release."""

    def _run_until(self, last: _Step) -> None:
        while last in self._queue:
            step = self._queue.pop(0)
            self._take_rows(step.plan)
            if step.plan.step_id in self._failing:
                step.error = RuntimeError("injected")
                self._broken.update(step.plan.row_request.tolist())
                if step.plan.moves:
                    self._broken.update(self._chains)
            else:
                step.output = self._run(step.plan)

    def _take_rows(self, plan: StepPlan) -> None:
        for new in plan.new_requests:
            known = [*new.prompt_token_ids, *new.output_token_ids]
            self._chains[new.row] = chain(self.salts[new.request_id], known)
            self._broken.discard(new.row)
        for row, position, slot in plan.slot_writes:
            self._slots[row, position] = slot

    def _run(self, plan: StepPlan) -> StepOutput:
        self._move(plan)
        self._append(plan)
        for i in range(plan.counts[Count.NUM_DECODE_ROWS]):
            self._check_decode(plan, i)
        for i in range(plan.counts[Count.NUM_EXTEND_REQUESTS]):
            self._check_extend(plan, i)
        tokens = []
        for row, position in zip(
            plan.row_request[plan.sample_rows], plan.row_position[plan.sample_rows], strict=True
        ):
            made = self._chains[row]
            assert len(made) == position + 1 or row in self._broken
            token = next_token(made[-1])
            made.append(hash((made[-1], token)))
            tokens.append(token)
        return StepOutput(np.array(tokens, np.int32))

    def _move(self, plan: StepPlan) -> None:
        touched: list[int] = []
        for move in plan.moves:
            target = range(move.dst_start, move.dst_start + move.length)
            touched += [*move.src_slots.tolist(), *target]
            self._arena[target.start : target.stop] = self._arena[move.src_slots]
        assert len(set(touched)) == len(touched), "sources and destinations overlap"

    def _append(self, plan: StepPlan) -> None:
        real = plan.slot_mapping[plan.slot_mapping != self._padding]
        assert len(np.unique(real)) == len(real), "two rows append to one slot"
        for token, row, position, slot in zip(
            plan.row_token, plan.row_request, plan.row_position, plan.slot_mapping, strict=True
        ):
            if row in self._broken:
                self._arena[slot] = NOTHING
                continue
            made = self._chains[row]
            assert position < len(made), f"row {row}: position {position} has no token yet"
            if token >= 0 and position:
                assert hash((made[position - 1], int(token))) == made[position], "input id"
            self._arena[slot] = made[position]
        self._arena[self._padding] = NOTHING

    def _check_decode(self, plan: StepPlan, i: int) -> None:
        spans: list[tuple[int, int, np.ndarray]] = []  # position, partial, slots
        row = int(plan.row_request[i])
        for item in plan.hot_items:
            first = item[HotItem.FIRST_ROW_ENTRY]
            rows = plan.hot_rows[first : first + item[HotItem.NUM_ROWS]].tolist()
            if i in rows:
                slots = item[HotItem.KV_START] + np.arange(item[HotItem.KV_LEN])
                partial = item[HotItem.FIRST_PARTIAL] + rows.index(i)
                spans.append((item[HotItem.POSITION], partial, slots))
        for item in plan.cold_items:
            if item[ColdItem.ROW] == i:
                kind, start, length, position = item[1:5]
                slots = self._span(row, kind, start, length)
                spans.append((position, item[ColdItem.FIRST_PARTIAL], slots))
        spans.sort(key=lambda span: span[0])
        merged = plan.merge_partials[plan.merge_indptr[i] : plan.merge_indptr[i + 1]]
        assert merged.tolist() == [partial for _, partial, _ in spans]
        self._check(row, int(plan.row_position[i]) + 1, [(p, slots) for p, _, slots in spans])

    def _check_extend(self, plan: StepPlan, i: int) -> None:
        last = plan.qo_indptr[i + 1] - 1
        row, spans = int(plan.row_request[last]), []
        for segment in plan.extend_segments[plan.extend_indptr[i] : plan.extend_indptr[i + 1]]:
            kind, start, length, position = segment[: ExtendSegment.VARIANT]
            spans.append((position, self._span(row, kind, start, length)))
        self._check(row, int(plan.row_position[last]) + 1, spans)

    def _span(self, row: int, kind: int, start: int, length: int) -> np.ndarray:
        if kind == SpanKind.RUN:
            return start + np.arange(length)
        return self._slots[row, start : start + length]

    def _check(self, row: int, visible: int, spans) -> None:
        """The spans hold each visible token once, in order."""
        if row in self._broken:
            return
        end = 0
        for position, slots in spans:
            assert position == end, f"row {row}: a span at {position}, expected {end}"
            want = self._chains[row][end : end + len(slots)]
            got = self._arena[slots].tolist()
            wrong = [k for k, (a, b) in enumerate(zip(want, got, strict=False)) if a != b]
            assert not wrong, f"row {row}: position {end + wrong[0]} holds another token"
            end += len(slots)
        assert end == visible, f"row {row}: {end} of {visible} tokens are read"


class Load:
    """One engine over a shadow arena, and what each of its requests must produce."""

    def __init__(self, sizes, *, layout, async_depth, is_late, failing):
        config = EngineConfig(
            prefix_layout=layout, async_depth=async_depth, profile="default", debug_checks=True,
            **({"max_seq_len": 128} | sizes),
        )  # fmt: skip
        self.executor = ShadowExecutor(config, is_late=is_late, failing=failing)
        self.now, self.made = 0.0, {}
        self.engine = Engine(config, executor=self.executor, clock=lambda: self.now)
        self.inputs: dict[str, tuple[int, list[int]]] = {}

    def add(self, prompt, max_tokens, salt, prefix_id, shared_prefix_len, priority):
        name = f"r{len(self.inputs)}"
        self.executor.salts[name] = len(salt)
        try:
            self.engine.add_request(
                name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0),
                salt=salt, prefix_id=prefix_id, priority=priority,
                shared_prefix_len=min(shared_prefix_len, len(prompt)),
            )  # fmt: skip
        except InvalidArgument:
            return  # longer than the arena
        self.inputs[name], self.made[name] = (len(salt), prompt), []

    def step(self):
        self.now += 7.0
        for out in self.engine.step():
            self.made[out.request_id] += out.token_ids
            if out.finish_reason is FinishReason.ERROR:
                assert str(out.error) == "injected", out.error
            if out.finished and out.finish_reason is FinishReason.LENGTH:
                assert self.made[out.request_id] == self.expected(out.request_id)

        storage = self.engine.cache.storage
        counted = storage.num_evictable()
        storage._num_evictable = None
        assert counted == storage.num_evictable(), "the kept count is stale"
        for node in self.engine.cache.tree.nodes():  # nothing behind a gap, nothing HOT below COLD
            parent = node.parent
            if parent.parent is not None and node.allocated:
                assert parent.is_complete or parent.writer is not None
                assert parent.is_hot or not node.is_hot

    def expected(self, name):
        salt, prompt = self.inputs[name]
        tokens = list(prompt)
        for _ in range(len(self.made[name])):
            tokens.append(next_token(chain(salt, tokens)[-1]))
        return tokens[len(prompt) :]

    def run(self, script):
        for action in script:
            if isinstance(action, tuple):
                self.add(*action)
            elif action < 0:
                self.engine.abort(f"r{len(self.inputs) + action}")
            else:
                for _ in range(action):
                    self.step()
        for _ in range(3000):
            if not self.engine.has_work():
                break
            self.step()
        assert not self.engine.has_work(), "no progress"
        self.check_idle()

    def check_idle(self):
        """Everything is free or cached by whole pages, and eviction returns all of it."""
        cache = self.engine.cache
        cache.check_conservation([])
        usage = cache.usage([])
        assert usage["retiring"] == 0
        assert usage["free"] + usage["cold"] + usage["hot"] == cache.arena.num_usable
        for node in cache.tree.nodes():
            assert node.users == node.locks == 0 and node.writer is None and not node.hinted
            assert node.published == node.allocated and node.start % cache.page_tokens == 0
        cache.evict(cache.arena.capacity)
        assert cache.arena.num_free == cache.arena.num_usable
        assert not list(cache.tree.nodes()), "nodes without storage and demand are left"
        assert not cache.tree.roots and not cache._paths
