"""Predicts CPU attention times from measured tables, so that the dispatcher follows the machine.

All times are per layer. Tables are over (rows, tokens) and read by linear interpolation; outside
they continue with the slope of their last interval. A profile is plain JSON: measured at first
start and cached, given by path, or "default", the one shipped with the package.
It knows nothing of plans or requests.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import numpy as np

from granikv import calibration
from granikv.attention.plan_parts import MIN_VIEW_TOKENS
from granikv.calibration import VERSION
from granikv.config import ModelConfig
from granikv.errors import InvalidArgument

log = logging.getLogger(__name__)

DEFAULT_PROFILE = Path(__file__).parent / "profiles" / "cpu_default.json"
DISTURBED_PROFILE_S = 600.0  # how soon after one that a busy machine gave another is measured
MAX_LOAD = 1.5  # of each processor, above which measuring is not even tried
FLAT_BASE_TOKENS = 64  # a row's own suffix, to which a short flat prefix is added

UNREADABLE = (OSError, ValueError, LookupError, TypeError, ZeroDivisionError)  # of a profile


def read_profile(path: Path) -> dict:
    """Raises OSError or ValueError."""
    profile = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(profile, dict):
        raise ValueError("not a JSON object")
    return profile


class CostModel:
    """Times in us per layer from `profile`, a dictionary as measure_cpu_profile returns it."""

    def __init__(self, profile: dict, model_config: ModelConfig):
        if profile.get("version") != VERSION:
            raise InvalidArgument("profile", profile.get("version"), f"version {VERSION}")
        self.profile, self.model = profile, model_config
        heads = profile["heads"]
        ours = model_config.num_qo_heads * model_config.head_dim
        self._scale = ours / (heads[0] * heads[2])  # 1 unless measured with another geometry
        self._hot = {
            v: Grid(profile["rows"], profile["hot_tokens"], profile[f"{v}_us"])
            for v in ("cascade", "gemm")
        }
        self._cold = Grid(profile["rows"], profile["cold_tokens"], profile["cold_us"])
        for name in ("gflops", "read_gb_per_s"):
            if not profile[name] > 0:
                raise InvalidArgument(f"profile: {name}", profile[name], "above 0")
        if len(profile["merge_us"]) != len(profile["rows"]):
            raise InvalidArgument("profile: merge_us", profile["merge_us"], "a time for each row")

    @classmethod
    def load(
        cls, profile: str | None, model_config: ModelConfig, num_threads: int = 0
    ) -> CostModel:
        """profile: path of a JSON file, "default", or None: measured once per machine.

        num_threads: 0 is torch's number. Raises InvalidArgument for an unreadable profile.
        """
        if profile is None:
            return cls(_cached_profile(model_config, num_threads), model_config)
        path = DEFAULT_PROFILE if profile == "default" else Path(profile)
        try:
            return cls(read_profile(path), model_config)
        except UNREADABLE as error:
            raise InvalidArgument("profile", profile, f"a readable profile ({error})") from error

    def hot_us(self, variant: str, num_rows: int, kv_len: int) -> float:
        """One shared span of kv_len tokens for num_rows decode rows, without the merge."""
        if variant not in self._hot:
            raise InvalidArgument("variant", variant, f"one of {sorted(self._hot)}")
        return self._scale * self._hot[variant](num_rows, kv_len)

    def cold_us(self, num_rows: int, total_tokens: int) -> float:
        """Gather and attention of scattered suffixes, total_tokens over all rows."""
        if num_rows == 0 or total_tokens == 0:
            return 0.0
        return self._scale * self._cold(num_rows, total_tokens / num_rows)

    def merge_us(self, num_rows: int) -> float:
        """Merge of two parts per row."""
        per_row = float(np.interp(num_rows, self.profile["rows"], self.profile["merge_us"]))
        return self._scale * per_row * max(1.0, num_rows / self.profile["rows"][-1])

    def marginal_flat_us(self, num_rows: int, kv_len: int) -> float:
        """Extra time when each row reads the span on its own, beside its suffix."""
        if kv_len >= MIN_VIEW_TOKENS:  # read in place, one call per row
            return num_rows * self.hot_us("cascade", 1, kv_len) + self.merge_us(num_rows)
        base = num_rows * FLAT_BASE_TOKENS
        longer = self.cold_us(num_rows, base + num_rows * kv_len)
        return max(0.0, longer - self.cold_us(num_rows, base))

    def label(self, num_rows: int, kv_tokens_read: int, kv_tokens_flat: int) -> str:
        """ "compute" or "memory": the longer of arithmetic and reads of a whole step."""
        m = self.model
        per_layer = (
            2 * m.hidden_size * (m.num_qo_heads + m.num_kv_heads) * m.head_dim
            + 3 * m.hidden_size * m.intermediate_size
        )
        weights = m.num_layers * per_layer + m.vocab_size * m.hidden_size
        scores = m.num_layers * m.num_qo_heads * m.head_dim * kv_tokens_flat
        compute_us = (2 * weights * num_rows + 4 * scores) / (self.profile["gflops"] * 1e3)
        read_bytes = 4 * weights + kv_tokens_read * m.kv_bytes_per_token()
        memory_us = read_bytes / (self.profile["read_gb_per_s"] * 1e3)
        return "compute" if compute_us > memory_us else "memory"


class Grid:
    """Table values [len(x), len(y)], bilinear inside, linear continuation outside, never < 0."""

    def __init__(self, x: list[float], y: list[float], values: list[list[float]]):
        self.x, self.y = np.asarray(x, float), np.asarray(y, float)
        self.values = np.asarray(values, float)
        if self.values.shape != (len(x), len(y)) or min(self.values.shape) < 2:
            raise ValueError(f"table: expected {(len(x), len(y))}, got {self.values.shape}")
        if not np.isfinite(self.values).all():
            raise ValueError("table: expected finite times")

    def __call__(self, x: float, y: float) -> float:
        i, wx = self._cell(self.x, x)
        j, wy = self._cell(self.y, y)
        low, high = (
            (1 - wy) * self.values[i + d, j] + wy * self.values[i + d, j + 1] for d in (0, 1)
        )
        return max(0.0, float((1 - wx) * low + wx * high))

    @staticmethod
    def _cell(axis: np.ndarray, at: float) -> tuple[int, float]:
        i = int(np.clip(np.searchsorted(axis, at) - 1, 0, len(axis) - 2))
        return i, float((at - axis[i]) / (axis[i + 1] - axis[i]))


def _cached_profile(model_config: ModelConfig, num_threads: int) -> dict:
    """The profile of this machine and head geometry, measured when no cached one is readable.

    The shipped one while the machine is too busy: its times are another machine's, but they fit
    together, and choices are made by comparing them.
    """
    path = calibration.profile_path(model_config, num_threads)
    try:
        profile = read_profile(path)
        CostModel(profile, model_config)
        if not profile.get("disturbed"):
            return profile
        if time.time() - path.stat().st_mtime < DISTURBED_PROFILE_S:
            log.info("profile %s was measured on a busy machine: the shipped one is used", path)
            return read_profile(DEFAULT_PROFILE)
        log.info("profile %s was measured on a busy machine and is measured again", path)
    except FileNotFoundError:
        log.info("measuring the CPU profile, cached in %s", path)
    except UNREADABLE as error:
        log.warning("profile %s is unreadable and is measured again: %s", path, error)
    load, num_cpus = calibration.machine_load()
    if load > MAX_LOAD * num_cpus:
        log.warning(
            "the machine is busy (load %.1f on %d processors): the shipped CPU profile is used, "
            "the next start on a quieter one measures its own",
            load,
            num_cpus,
        )
        return read_profile(DEFAULT_PROFILE)
    meter = calibration.Meter(warn=lambda text: log.info("calibration: %s", text))
    with calibration.torch_threads(num_threads):
        profile = calibration.measure_cpu_profile(model_config, meter=meter)
    try:
        calibration.store_profile(profile, path)
    except OSError as error:
        log.warning("the CPU profile could not be cached: %s", error)
    if not profile.get("disturbed"):
        return profile
    log.warning(
        "other programs disturbed the measurement of the CPU profile: the shipped one is used, "
        "a start after %.0f minutes measures again; or run `granikv calibrate` when it is quiet",
        DISTURBED_PROFILE_S / 60,
    )
    return read_profile(DEFAULT_PROFILE)
