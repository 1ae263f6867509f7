"""Engine configuration: plain data, validated once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from granikv.errors import InvalidArgument

INT32_MAX = 2**31 - 1  # slots and lengths are int32 in every plan
SIZES = (
    "num_layers", "hidden_size", "intermediate_size", "num_qo_heads", "num_kv_heads", "head_dim",
    "vocab_size", "max_position",
)  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer (Llama, Mistral, Qwen2, Qwen2.5, Qwen3)."""

    architecture: str  # one of granikv.models.ARCHITECTURES
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int  # longest context, tokens
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # Hugging Face's dictionary (llama3, linear) or None
    tie_embeddings: bool = False
    attention_bias: bool = False  # Qwen2 and Qwen2.5: bias on q, k, v
    qk_norm: bool = False  # Qwen3: RMSNorm per head on q and k before rope
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    # of every layer: a query at position p sees the keys in (p - sliding_window, p]; None: [0, p]
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name in (*SIZES, *(() if self.sliding_window is None else ("sliding_window",))):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= INT32_MAX:
                raise InvalidArgument(name, value, f"an integer from 1 to {INT32_MAX}")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 < value < math.inf):
                raise InvalidArgument(name, value, "a number above 0")
        for token in self.eos_token_ids:
            if not isinstance(token, int) or isinstance(token, bool):
                raise InvalidArgument("eos_token_ids", token, "integers")
        if self.num_qo_heads % self.num_kv_heads:
            raise InvalidArgument(
                "num_qo_heads", self.num_qo_heads, f"a multiple of num_kv_heads={self.num_kv_heads}"
            )

    @property
    def gqa_group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    def kv_bytes_per_token(self, dtype_bytes: int = 4) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


UNIFORM_PAGE_TOKENS = 16  # the usual page of paged engines


DEVICES = ("auto", "cpu", "cuda")
EXECUTORS = ("torch", "tensorrt")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")  # as users of vLLM and TensorRT-LLM know them
# Of weights. fp8: e4m3 with a scale per output channel, or as an FP8 checkpoint has them
QUANTIZATIONS = (None, "fp8", "fp8_per_tensor")
ALL_REDUCES = ("auto", "nccl", "two_shot", "fused")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_THREADS = 1024
CPU_CAPACITY_TOKENS = 65536
GPU_MEMORY_UTILIZATION = 0.9
LIMITS = {  # lowest and highest
    "capacity_tokens": (2, INT32_MAX),
    "max_requests": (1, 65536),
    "max_seq_len": (0, INT32_MAX),
    "max_num_batched_tokens": (1, 2**20),
    "max_queued_requests": (1, INT32_MAX),
    "min_extent_tokens": (1, INT32_MAX),
    "max_move_tokens": (0, INT32_MAX),
    "num_threads": (0, MAX_THREADS),  # torch itself crashes on absurd numbers
    "async_depth": (0, 1),
    "tp": (1, 1024),
}


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and policies of one engine. Lengths are in tokens."""

    model: str | Path | None = None  # GGUF file or Hugging Face folder; None: the embedded model
    random_weights: bool = False  # `model` gives the shape alone: speed without a download
    device: str = "auto"  # one of DEVICES; auto: the GPU where there is one
    dtype: str = "auto"  # of weights and KV; auto: bfloat16 on a GPU, float32 on the CPU
    kv_cache_dtype: str = "auto"  # one of KV_CACHE_DTYPES; auto: dtype; fp8 is fp8_e4m3, on a GPU
    quantization: str | None = None  # one of QUANTIZATIONS; None: as the checkpoint is
    executor: str = "torch"  # one of EXECUTORS
    engine_dir: str | None = None  # with executor tensorrt: what `granikv build` wrote
    plugin: str | None = None  # with executor tensorrt: GraniKV's plugin library
    tp: int = 1  # tensor-parallel ranks, a process and a GPU each; on a CPU by gloo, for tests
    all_reduce: str = "auto"  # one of ALL_REDUCES, between GPUs; auto: measured at the start
    warm_up: bool = True  # of a GPU with executor torch: kernels compile before it is ready
    # KV arena, one padding slot included; None: CPU_CAPACITY_TOKENS, or what fits on a GPU
    capacity_tokens: int | None = None
    gpu_memory_utilization: float = (
        GPU_MEMORY_UTILIZATION  # of a GPU's whole memory, with weights and all else
    )
    max_requests: int = 256  # rows of the request table: running at once
    max_seq_len: int = 0  # 0: the model's context
    max_num_batched_tokens: int = 512  # rows of one step
    max_queued_requests: int = 4096
    min_extent_tokens: int = 256  # shorter shared prefixes stay COLD
    recency_window_s: float = 30.0  # a prefix used this recently counts as shared by a newcomer
    max_move_tokens: int = 8192  # promotion copies per step
    enable_prefix_caching: bool = True
    prefix_layout: str = "asymmetric"  # or "uniform": UNIFORM_PAGE_TOKENS pages, the baseline
    async_depth: int = 1
    num_threads: int = 0  # 0: torch's default
    profile: str | None = None  # hardware profile, JSON; None: measured at first start, cached
    debug_checks: bool = False  # conservation and finite-logit checks every step

    def __post_init__(self) -> None:
        for name, (lowest, highest) in LIMITS.items():
            value = getattr(self, name)
            if not (value is None and name == "capacity_tokens") and not lowest <= value <= highest:
                raise InvalidArgument(name, getattr(self, name), f"{lowest} to {highest}")
        if not 0 <= self.recency_window_s < math.inf:
            raise InvalidArgument("recency_window_s", self.recency_window_s, "0 or more seconds")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            expected = f"one of {KV_CACHE_DTYPES}"
            raise InvalidArgument("kv_cache_dtype", self.kv_cache_dtype, expected)
        if self.quantization not in QUANTIZATIONS:
            expected = f"one of {QUANTIZATIONS}"
            raise InvalidArgument("quantization", self.quantization, expected)
        self._check_executor()
        self._check_all_reduce()
        if self.prefix_layout not in ("asymmetric", "uniform"):
            raise InvalidArgument("prefix_layout", self.prefix_layout, "'asymmetric' or 'uniform'")
        self._check_memory()

    def _check_memory(self) -> None:
        share, capacity = self.gpu_memory_utilization, self.capacity_tokens
        if not 0.0 < share <= 1.0:
            raise InvalidArgument("gpu_memory_utilization", share, "a number in (0, 1]")
        if share != GPU_MEMORY_UTILIZATION and self.device == "cpu":
            expected = f"{GPU_MEMORY_UTILIZATION}, or a GPU"
            raise InvalidArgument("gpu_memory_utilization", share, expected)
        lowest = self.page_tokens + 1
        if capacity is not None and capacity < lowest:
            expected = f"None, or at least {lowest}: one page and the padding slot"
            raise InvalidArgument("capacity_tokens", capacity, expected)

    def _check_executor(self) -> None:
        if self.executor not in EXECUTORS:
            raise InvalidArgument("executor", self.executor, f"one of {EXECUTORS}")
        if self.executor == "tensorrt":
            for name in ("engine_dir", "plugin"):
                if getattr(self, name) is None:
                    raise InvalidArgument(name, None, "a path, with executor='tensorrt'")
            if self.fp8_kv:
                expected = "'auto': engines have no FP8 KV; executor='torch' on a GPU has"
                raise InvalidArgument("kv_cache_dtype", self.kv_cache_dtype, expected)
            if self.quantization is not None:
                expected = "None: engines have no FP8 weights; executor='torch' has"
                raise InvalidArgument("quantization", self.quantization, expected)
            return
        for name, unset in (("engine_dir", None), ("plugin", None)):
            if getattr(self, name) != unset:
                expected = f"{unset}, or executor='tensorrt'"
                raise InvalidArgument(name, getattr(self, name), expected)

    def _check_all_reduce(self) -> None:
        if self.all_reduce not in ALL_REDUCES:
            raise InvalidArgument("all_reduce", self.all_reduce, f"one of {ALL_REDUCES}")
        has_choice = self.tp > 1 and self.executor == "torch" and self.device != "cpu"
        if self.all_reduce not in ("auto", "nccl") and not has_choice:
            expected = "'auto' or 'nccl', or tp above 1 with executor='torch' on GPUs"
            raise InvalidArgument("all_reduce", self.all_reduce, expected)

    @property
    def fp8_kv(self) -> bool:
        """Whether KV is stored as e4m3 with a scale per layer."""
        return self.kv_cache_dtype != "auto"

    @property
    def kv_dtype(self) -> str:
        """torch's name of the stored KV's type, once dtype is decided."""
        return "float8_e4m3fn" if self.fp8_kv else self.dtype

    @property
    def kv_element_bytes(self) -> int:
        """Of one stored number; a dtype that is not decided yet counts as float32."""
        return 1 if self.fp8_kv else DTYPE_BYTES.get(self.dtype, 4)

    @property
    def arena_tokens(self) -> int:
        """capacity_tokens, once it is decided."""
        if self.capacity_tokens is None:
            expected = "a number: resolve_device decides it on a CPU, the executor on a GPU"
            raise InvalidArgument("capacity_tokens", None, expected)
        return self.capacity_tokens

    @property
    def page_tokens(self) -> int:
        """COLD slots taken at a time, and what prefix matches are rounded down to."""
        return UNIFORM_PAGE_TOKENS if self.prefix_layout == "uniform" else 1
