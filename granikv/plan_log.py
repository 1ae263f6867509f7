"""GRANIKV_LOG_PLAN=1: every step's plan as lines on stderr, each choice with its reason.

It only prints what the dispatcher recorded in the plan.
"""

from __future__ import annotations

import logging

from granikv import env
from granikv.core import Count, StepPlan

log = logging.getLogger("granikv.plan")


def enabled() -> bool:
    """Whether plans are to be written; sets the logger up when they are. Raises InvalidArgument."""
    is_on = env.read("GRANIKV_LOG_PLAN")
    if is_on and not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("plan: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
    if is_on:
        log.setLevel(logging.INFO)
    return is_on


def write(plan: StepPlan) -> None:
    for line in lines(plan):
        log.info("%s", line)


def lines(plan: StepPlan) -> list[str]:
    """One line for the step, one for each shared span, one for what is not shared."""
    counts = plan.counts
    num_rows, num_decode = int(counts[Count.NUM_ROWS]), int(counts[Count.NUM_DECODE_ROWS])
    num_extend = int(counts[Count.NUM_EXTEND_REQUESTS])
    text = [
        f"step {plan.step_id}: {num_decode} decode rows, {num_rows - num_decode} extend rows of "
        f"{num_extend} requests; {plan.regime}-bound; KV tokens read {plan.kv_tokens_read}, "
        f"unshared {plan.kv_tokens_flat}; shared spans predicted {plan.predicted_us:.0f} us per layer"
    ]
    for choice in plan.choices:
        text.append(
            f"step {plan.step_id}: prefix [{choice.node_position}, "
            f"{choice.node_position + choice.kv_len}) x {choice.num_rows} rows -> {choice.reason}"
        )
    num_cold = int(counts[Count.NUM_COLD_ITEMS])
    if num_cold:
        reason = "suffixes" if plan.choices else "no HOT prefix in this step"
        text.append(f"step {plan.step_id}: cold: {num_cold} private spans ({reason})")
    if num_extend:
        text.append(
            f"step {plan.step_id}: extend: one fused pass per request (prompt rows are computed)"
        )
    for reason in sorted({move.reason for move in plan.moves}):
        lengths = [move.length for move in plan.moves if move.reason == reason]
        text.append(
            f"step {plan.step_id}: move: {sum(lengths)} tokens to {len(lengths)} places ({reason})"
        )
    return text
