"""A request whose stored output others store too, while many others take and give back slots."""

from __future__ import annotations

import pytest
from tiny_engine import ARCHS, Made, add, assert_matched, check_clean, make_engine, tokens

SLOW, OTHERS = 200, 50
PREFIX = tokens(40, 40)


def generate(engine, others: int) -> Made:
    """The slow request's tokens and logits; `others` churn beside it, two at a time.

    A twin of the slow one ends early: the tree then stores what the slow one still reads from
    slots of its own. Of the others some continue as the twin did, most have nothing in common.
    """
    engine.recorded_logits.clear()
    made, twins = Made(), []
    add(engine, "slow", PREFIX, SLOW)
    if others:
        add(engine, "twin", PREFIX, 30)
    waiting, live = list(range(others)), 0
    while engine.has_work():
        while waiting and live < 2 and len(twins) == 30:
            i = waiting.pop(0)
            own = tokens(700 + i, 30) if i % 5 else PREFIX + twins[: 5 + i % 25]
            add(engine, f"other{i}", own, 2 + i % 7)
            live += 1
        for out in engine.step():
            assert out.error is None
            if out.request_id == "slow":
                made += out.token_ids
            elif out.request_id == "twin":
                twins += out.token_ids
            else:
                live -= out.finished
    assert not waiting
    check_clean(engine)
    made.logits = engine.recorded_logits["slow"]
    return made


@pytest.mark.parametrize("layout", ["asymmetric", "uniform"])
def test_c46_a_slow_request_amid_churn_gives_its_solo_output(models, layout):
    engine = make_engine(models, prefix_layout=layout)
    solo = generate(engine, 0)
    engine.close()
    engine = make_engine(models, prefix_layout=layout, capacity_tokens=449)
    churned = generate(engine, OTHERS)
    assert engine.cache.counters["evicted_tokens"] > 449
    assert engine.scheduler.num_preemptions == 0
    engine.close()
    assert churned == solo and len(solo) == SLOW
    assert_matched(models, ARCHS[0], PREFIX, churned)
