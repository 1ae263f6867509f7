"""Predicts GPU attention times from a few rates: read bandwidth, matrix rates, item cost.

    time of a shared span = longer of (its KV once / bandwidth) and (its products / rate)

All times are per layer. `cascade` rows fill small tiles at a lower rate than `gemm` tiles do.
Same questions as granikv.cost_model.CostModel; it knows nothing of plans or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from granikv.attention.layout_choice import H200_RATES, SmRates
from granikv.config import ModelConfig
from granikv.cost_model import UNREADABLE, read_profile
from granikv.errors import InvalidArgument

PROFILES = Path(__file__).parent / "profiles"
STORED = Path(".cache") / "granikv"  # in the user's folder: what `granikv calibrate` fitted
FIELDS = ("read_gb_per_s", "gemm_tflops", "cascade_tflops", "matmul_tflops", "item_us", "merge_ns")
OPTIONAL_FIELDS = ("step_us", "span_us", "hot_tflops_per_sm", "read_gb_per_s_per_sm")


def stored_profile_path(gpu_name: str) -> Path:
    """Where the profile fitted on this GPU model is kept; it need not exist."""
    return Path.home() / STORED / f"gpu-{file_stem(gpu_name)}.json"


def file_stem(gpu_name: str) -> str:
    return gpu_name.lower().replace(" ", "_").replace("/", "_")


@dataclass(frozen=True)
class SumTimes:
    """Measured times of a sum over ranks, by size in ascending order."""

    sizes_bytes: tuple[int, ...]
    times_us: tuple[float, ...]

    def us(self, num_bytes: int) -> float:
        """Between two sizes on a line; above the largest at its rate."""
        largest = self.sizes_bytes[-1]
        if num_bytes > largest:
            return self.times_us[-1] * num_bytes / largest
        return float(np.interp(num_bytes, self.sizes_bytes, self.times_us))


class GpuCostModel:
    """profile: a dictionary with the fields of FIELDS, and where they were fitted those of
    OPTIONAL_FIELDS: launches of one layer, a row's own read of a span, and rates of an SM as SmRates
    has them; element_bytes: of the model, and of the KV
    cache and the layers' weights unless kv_element_bytes (1: FP8, which is widened at the same rate)
    and weight_element_bytes (1: FP8, of which the matrix units take twice as many) say otherwise.
    """

    def __init__(
        self,
        profile: dict,
        model_config: ModelConfig,
        element_bytes: int,
        kv_element_bytes: int | None = None,
        weight_element_bytes: int | None = None,
    ):
        missing = [name for name in FIELDS if not profile.get(name, 0) > 0]
        if missing:
            raise InvalidArgument("profile", sorted(profile), f"with {', '.join(missing)}")
        for name in OPTIONAL_FIELDS:
            if name in profile and not profile[name] > 0:
                raise InvalidArgument(f"profile: {name}", profile[name], "above 0")
        self.profile, self.model, self.element_bytes = profile, model_config, element_bytes
        self.sum_times: SumTimes | None = None  # of tensor-parallel ranks, two sums a layer
        self.kv_element_bytes = kv_element_bytes or element_bytes
        self.weight_element_bytes = weight_element_bytes or element_bytes

    @classmethod
    def load(
        cls,
        profile: str | None,
        model_config: ModelConfig,
        element_bytes: int,
        gpu_name: str,
        kv_element_bytes: int | None = None,
        weight_element_bytes: int | None = None,
    ) -> GpuCostModel:
        """profile: path of a JSON file, "default": the packaged one that fits any GPU, or None: the
        one that was fitted here for this GPU, else the packaged one of it, else the default.
        Raises InvalidArgument."""
        if profile == "default":
            path = PROFILES / "gpu_default.json"
        elif profile is None:
            named = (stored_profile_path(gpu_name), PROFILES / f"{file_stem(gpu_name)}.json")
            path = next((p for p in named if p.is_file()), PROFILES / "gpu_default.json")
        else:
            path = Path(profile)
        try:
            fields = read_profile(path)
            return cls(fields, model_config, element_bytes, kv_element_bytes, weight_element_bytes)
        except UNREADABLE as error:
            raise InvalidArgument("profile", str(path), f"a readable profile ({error})") from error

    @property
    def sm_rates(self) -> SmRates:
        """Of the profile, or of an H200 where it has none."""
        got, usual = self.profile, H200_RATES
        return SmRates(
            got.get("hot_tflops_per_sm", usual.flop_per_us / 1e6) * 1e6,
            got.get("read_gb_per_s_per_sm", usual.bytes_per_us / 1e3) * 1e3,
        )

    def read_us(self, num_tokens: float) -> float:
        """Keys and values of so many tokens, once."""
        model = self.model
        num_bytes = 2 * model.num_kv_heads * model.head_dim * self.kv_element_bytes * num_tokens
        return num_bytes / (self.profile["read_gb_per_s"] * 1e3)

    def hot_us(self, variant: str, num_rows: int, kv_len: int) -> float:
        """One shared span of kv_len tokens for num_rows decode rows, without the merge."""
        if variant not in ("cascade", "gemm"):
            raise InvalidArgument("variant", variant, "one of ['cascade', 'gemm']")
        model = self.model
        tile = 16 if variant == "cascade" else 128  # rows of a tile: the rest is padding
        stacked = num_rows * model.gqa_group_size
        stacked = -(-stacked // tile) * tile
        flops = 4 * stacked * model.num_kv_heads * model.head_dim * kv_len
        compute_us = flops / (self.profile[f"{variant}_tflops"] * 1e6)
        return max(self.read_us(kv_len), compute_us) + self.profile["item_us"]

    def extend_us(self, num_rows: int, visible: int, num_sms: int) -> float:
        """Rows of one request in one pass over the tokens that they see: a block for each tile of
        128 stacked rows and KV head, which takes the keys one after another."""
        model = self.model
        blocks = -(-num_rows * model.gqa_group_size // 128) * model.num_kv_heads
        flops = 4 * 128 * model.head_dim * visible
        return -(-blocks // num_sms) * flops * num_sms / (self.profile["gemm_tflops"] * 1e6)

    def merge_us(self, num_rows: int) -> float:
        """One more partial state per row."""
        return num_rows * self.model.num_qo_heads * self.profile["merge_ns"] / 1e3

    def marginal_flat_us(self, num_rows: int, kv_len: int) -> float:
        """Extra time when each row reads the span on its own, beside its suffix."""
        span_us = self.read_us(kv_len) + self.profile.get("span_us", 0.0)
        return num_rows * span_us + self.merge_us(num_rows)

    def label(self, num_rows: int, kv_tokens_read: int, kv_tokens_flat: int) -> str:
        """ "compute", "memory" or "communication": the longest of a whole step's arithmetic, reads
        and sums over ranks, which nothing hides."""
        m = self.model
        per_layer = (
            2 * m.hidden_size * (m.num_qo_heads + m.num_kv_heads) * m.head_dim
            + 3 * m.hidden_size * m.intermediate_size
        )
        layers, head = m.num_layers * per_layer, m.vocab_size * m.hidden_size
        scores = 4 * m.num_layers * m.num_qo_heads * m.head_dim * kv_tokens_flat
        products = layers * self.weight_element_bytes / self.element_bytes + head
        compute_us = 2 * products * num_rows / (self.profile["matmul_tflops"] * 1e6)
        compute_us += scores / (self.profile["gemm_tflops"] * 1e6)
        read_bytes = self.weight_element_bytes * layers + self.element_bytes * head
        memory_us = read_bytes / (self.profile["read_gb_per_s"] * 1e3)
        memory_us += m.num_layers * self.read_us(kv_tokens_read)
        sums_us = 0.0
        if self.sum_times is not None:
            message_bytes = num_rows * m.hidden_size * self.element_bytes
            sums_us = 2 * m.num_layers * self.sum_times.us(message_bytes)
        if sums_us > max(compute_us, memory_us):
            return "communication"
        return "compute" if compute_us > memory_us else "memory"
