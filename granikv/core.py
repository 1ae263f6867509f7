"""Plain data shared by every layer: requests, batches, the step plan and its field table.

One token axis per request; every position below `num_computed` has a slot in the arena:

    position  0            1500      2700          2764   now
              |--- HOT ---|-- HOT --|--- COLD ----|- COLD -|
              everyone      group     prompt rest   output

It knows nothing of torch, of the model or of how a kernel runs.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NewType

import numpy as np

from granikv.sampling_params import SamplingParams

if TYPE_CHECKING:
    from granikv.cache.prefix_tree import Node

RequestRow = NewType("RequestRow", int)  # row of the request table, fixed from admission to end

# (model, adapter, salt, KV dtype and scales): each a tagged field, never one joined string
Namespace = tuple[str, str, str, str]


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"  # has a row; in prefill until num_computed reaches the known tokens
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(eq=False)
class Request:
    """One sequence. Only the scheduler, the cache manager and the engine change it.

    The dispatcher notes how the last step read it: num_hot_tokens, attention_path.
    """

    request_id: str
    prompt_token_ids: np.ndarray  # int32 [prompt_len]
    params: SamplingParams
    namespace: Namespace = ("", "", "", "")
    arrival_time: float = field(default_factory=time.monotonic)
    priority: int = 0
    prefix_id: str = ""  # a prefix the client declares as shared
    shared_prefix_len: int = 0  # tokens of the prompt the client declares as shared

    status: Status = Status.WAITING
    row: RequestRow | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0  # positions with published KV, or written by a launched step
    num_published: int = 0  # positions whose KV is committed
    num_scheduled_output: int = 0  # tokens asked for, one ahead of output when asynchronous
    leaf: Node | None = None  # deepest tree node of the known tokens (cache manager)
    leaf_end: int = 0  # position behind the leaf's last token
    tail_slots: list[int] = field(default_factory=list)  # COLD slots from position leaf_end on
    tail_filled_step: int = -1  # the last step whose moves write part of them
    num_cached_tokens: int = 0  # reused at first admission
    num_hot_tokens: int = 0  # of the context, in extents at the last step
    attention_path: str = "cold"  # or how the last step read most of its HOT tokens
    cum_logprob: float = 0.0  # over all output tokens, when logprobs are asked for
    num_recomputed_tokens: int = 0  # again after a preemption, to be counted; never as hits
    num_preemptions: int = 0
    num_overtaken: int = 0  # admissions that passed this request while it did not fit
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self) -> np.ndarray:
        """int32 [num_tokens]: prompt and output."""
        if not self.output_token_ids:
            return self.prompt_token_ids
        return np.concatenate(
            [self.prompt_token_ids, np.asarray(self.output_token_ids, dtype=np.int32)]
        )


@dataclass(frozen=True)
class NewRow:
    """A request that takes a row of the request table with this step."""

    row: RequestRow
    request_id: str
    params: SamplingParams
    prompt_token_ids: np.ndarray  # int32 [prompt_len]
    output_token_ids: tuple[int, ...]  # made before a preemption


@dataclass
class ScheduledExtend:
    """num_tokens extend rows of one request, from position `start`."""

    request: Request
    start: int
    slots: np.ndarray  # int32 [num_tokens]: where the rows are appended
    samples: bool  # the last row's logits give the next token

    @property
    def num_tokens(self) -> int:
        return len(self.slots)


@dataclass
class Batch:
    """Who runs this step. Decode rows (one token, prompt computed) come before extend rows.

    Decode rows are parallel lists, since there are hundreds of them; each one samples.
    """

    decodes: list[Request]
    decode_positions: np.ndarray  # int32 [num_decodes]
    decode_slots: np.ndarray  # int32 [num_decodes]
    running_version: int  # equal in two batches: nobody was admitted or removed in between
    extends: list[ScheduledExtend] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + sum(s.num_tokens for s in self.extends)

    @property
    def requests(self) -> list[Request]:
        return [*self.decodes, *(s.request for s in self.extends)]


# ---------------------------------------------------------------------------------------------
# StepPlan


@dataclass(frozen=True)
class PlanField:
    name: str
    shape: tuple[str | int, ...]  # in capacities, see PlanCapacities
    where: str  # "device" or "host"
    writer: str
    readers: str
    meaning: str
    dtype: str = "int32"


class Count(enum.IntEnum):
    """Entries of `counts`."""

    NUM_ROWS = 0
    NUM_DECODE_ROWS = 1
    NUM_EXTEND_REQUESTS = 2
    NUM_HOT_ITEMS = 3
    NUM_HOT_ROWS = 4
    NUM_COLD_ITEMS = 5
    NUM_EXTEND_SEGMENTS = 6
    NUM_PARTIALS = 7
    NUM_SAMPLE_ROWS = 8
    NUM_SLOT_WRITES = 9


class HotItem(enum.IntEnum):
    """Columns of `hot_items`: one contiguous span read once for `NUM_ROWS` decode rows."""

    FIRST_ROW_ENTRY = 0  # into hot_rows
    NUM_ROWS = 1
    KV_START = 2  # first arena slot
    KV_LEN = 3
    POSITION = 4  # token position of KV_START
    FIRST_PARTIAL = 5  # partial of the item's first row; row i of the item has FIRST_PARTIAL + i
    VARIANT = 6  # HotVariant
    FLAGS = 7


class ColdItem(enum.IntEnum):
    """Columns of `cold_items`: a span read for one decode row."""

    ROW = 0  # the row, not the request: a kernel needs both and row_request gives the other
    KIND = 1  # SpanKind
    START = 2  # RUN: first arena slot; SLOTS: first position in request_slots[request]
    LEN = 3
    POSITION = 4  # token position of the first entry
    FIRST_PARTIAL = 5
    VARIANT = 6
    FLAGS = 7


class ExtendSegment(enum.IntEnum):
    """Columns of `extend_segments`: spans of an extend request in token order, own chunk last.

    Append runs before attention, so the own chunk is read from the arena like all else; a row
    sees a key when the key's position is not above its own.
    """

    KIND = 0
    START = 1
    LEN = 2
    POSITION = 3
    VARIANT = 4
    FLAGS = 5


class SpanKind(enum.IntEnum):
    RUN = 0  # contiguous slots
    SLOTS = 1  # through request_slots


class HotVariant(enum.IntEnum):
    CASCADE = 0
    GEMM = 1


PLAN_FIELDS: tuple[PlanField, ...] = (
    PlanField("counts", (16,), "device", "planner", "executor, kernels", "see Count"),
    PlanField("row_token", ("T",), "device", "planner", "embedding", "input id; -1: the request's last sampled id, on the device"),
    PlanField("row_request", ("T",), "device", "planner", "kernels, sampler", "request row"),
    PlanField("row_position", ("T",), "device", "planner", "rope, kernels", "token position; sees keys at positions [kv_lo, position]"),
    PlanField("slot_mapping", ("T",), "device", "planner", "append", "slot that receives the row's K and V; padded rows: the last slot"),
    PlanField("hot_items", ("H", 8), "device", "planner", "hot", "see HotItem"),
    PlanField("hot_rows", ("HR",), "device", "planner", "hot", "rows of each item"),
    PlanField("cold_items", ("C", 8), "device", "planner", "cold", "see ColdItem"),
    PlanField("merge_indptr", ("T+1",), "device", "planner", "merge", "CSR over decode rows"),
    PlanField("merge_partials", ("S",), "device", "planner", "merge", "partials of each row, in position order"),
    PlanField("qo_indptr", ("R+1",), "device", "planner", "extend", "rows of extend request i: [qo_indptr[i], qo_indptr[i+1]), absolute"),
    PlanField("extend_indptr", ("R+1",), "device", "planner", "extend", "segments of extend request i"),
    PlanField("extend_segments", ("X", 8), "device", "planner", "extend", "see ExtendSegment"),
    PlanField("sample_rows", ("R",), "device", "planner", "logits, sampler", "rows whose logits are sampled"),
    PlanField("slot_writes", ("W", 3), "device", "planner", "executor", "request_slots[row, position] = slot, before append"),
)  # fmt: skip


@dataclass(frozen=True)
class PlanCapacities:
    """Sizes that the plan's buffers are made for, once."""

    max_requests: int  # R
    max_rows: int  # T
    max_hot_items: int  # H
    max_hot_rows: int  # HR
    max_cold_items: int  # C
    max_partials: int  # S
    max_extend_segments: int  # X
    max_slot_writes: int  # W

    def resolve(self, shape: Sequence[str | int]) -> tuple[int, ...]:
        """Numbers for the symbols of a PlanField's shape."""
        symbols = {
            "R": self.max_requests,
            "R+1": self.max_requests + 1,
            "T": self.max_rows,
            "T+1": self.max_rows + 1,
            "H": self.max_hot_items,
            "HR": self.max_hot_rows,
            "C": self.max_cold_items,
            "S": self.max_partials,
            "X": self.max_extend_segments,
            "W": self.max_slot_writes,
        }
        return tuple(s if isinstance(s, int) else symbols[s] for s in shape)


@dataclass(frozen=True)
class Move:
    """Copy of `length` tokens in every layer, before append. Source may be scattered."""

    src_slots: np.ndarray  # int32 [length]
    dst_start: int
    reason: str = "promotion"  # or "compaction"; for the log

    @property
    def length(self) -> int:
        return len(self.src_slots)


@dataclass(frozen=True)
class Choice:
    """One decision of the dispatcher, kept for the log, the metrics and the tests."""

    node_position: int
    kv_len: int
    num_rows: int
    variant: str  # "cascade", "gemm" or "flat"
    reason: str
    predicted_us: float


@dataclass
class StepPlan:
    """Everything a step decides. Arrays have this step's counts.

    Plans with the same grouping of decode rows share arrays: read them, never write to them.
    """

    step_id: int
    counts: np.ndarray
    row_token: np.ndarray
    row_request: np.ndarray
    row_position: np.ndarray
    slot_mapping: np.ndarray
    hot_items: np.ndarray
    hot_rows: np.ndarray
    cold_items: np.ndarray
    merge_indptr: np.ndarray
    merge_partials: np.ndarray
    qo_indptr: np.ndarray
    extend_indptr: np.ndarray
    extend_segments: np.ndarray
    sample_rows: np.ndarray
    slot_writes: np.ndarray
    # host only
    sample_requests: list[Request] = field(default_factory=list)  # one per sample row
    new_requests: list[NewRow] = field(default_factory=list)  # sampler rows set before the step
    moves: list[Move] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    layout: str = ""  # how a GPU launches the decode rows (attention/variants.py); "" on a CPU
    regime: str = ""  # "compute", "memory" or "communication"
    predicted_us: float = 0.0
    kv_tokens_read: int = 0  # slots read per layer and KV head
    kv_tokens_flat: int = 0  # what one read per request would be


@dataclass
class StepOutput:
    """What a step returns: one entry per sample row."""

    token_ids: np.ndarray  # int32 [num_sample_rows]
    logprobs: np.ndarray | None = None  # float32 [num_sample_rows], of the chosen tokens
    top_ids: np.ndarray | None = None  # int32 [num_sample_rows, k]
    top_logprobs: np.ndarray | None = None  # float32 [num_sample_rows, k]
    logits: np.ndarray | None = None  # float32 [num_sample_rows, vocab], debug only
    elapsed_s: float = 0.0
    num_compilations: int = 0  # kernels that its launch had to wait for


@dataclass(slots=True)
class RequestOutput:
    """What one step adds to one request: text and ids are what is new since the last output."""

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # natural log, of token_ids
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    cum_logprob: float = 0.0  # over all output tokens so far
    finished: bool = False
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # so far
    num_cached_tokens: int = 0
    num_hot_tokens: int = 0
    attention_path: str = ""  # "cascade", "gemm", "flat" or "cold" at the last step
    arrival_time: float = 0.0  # time.monotonic()
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
