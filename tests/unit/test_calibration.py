"""Calibration's sanity checks, with a made-up clock: nothing here is timed."""

from __future__ import annotations

import pytest

from granikv.calibration import Meter

ROWS, TOKENS = [1, 4, 16], [64, 256, 1024]


class Machine:
    """A clock that calls move. `disturb`: cell -> factors of its first calls."""

    def __init__(self, disturb=None):
        self.now, self.disturb, self.num_calls = 0.0, dict(disturb or {}), {}

    def clock(self) -> float:
        return self.now

    def cell(self, rows: int, tokens: int):
        def call() -> None:
            index = self.num_calls[rows, tokens] = self.num_calls.get((rows, tokens), -1) + 1
            factors = self.disturb.get((rows, tokens), [])
            us = 50 + rows * tokens * 0.02
            self.now += us * (factors[index] if index < len(factors) else 1.0) / 1e6

        return call


def measured(machine):
    meter = Meter(machine.clock)
    return meter, meter.table("cascade", ROWS, TOKENS, machine.cell, repeats=5)


TRUE = [[pytest.approx(50 + r * n * 0.02, abs=0.1) for n in TOKENS] for r in ROWS]


def test_a_quiet_machine_is_measured_once():
    machine = Machine()
    meter, values = measured(machine)
    assert values == TRUE and meter.warnings == []
    assert set(machine.num_calls.values()) == {Meter.WARMUP_CALLS + 5 - 1}


def test_slow_first_calls_do_not_count():
    meter, values = measured(Machine({(4, 256): [20000.0, 300.0]}))
    assert values == TRUE and meter.warnings == []


def test_a_steadily_slow_cell_is_measured_again_and_a_warning_says_so():
    meter, values = measured(Machine({(4, 256): [1.0] * 2 + [40.0] * 5}))
    assert values == TRUE
    (warning,) = meter.warnings
    assert "cascade, 4 rows x 256 tokens" in warning and "measured again: 70 us" in warning


def test_a_value_that_stays_off_is_kept_and_called_confirmed():
    meter, values = measured(Machine({(1, 64): [40.0] * 100}))
    assert values[0][0] == pytest.approx(51.3 * 40, rel=0.01)
    assert "confirmed" in meter.warnings[0] and len(meter.warnings) == 1


def test_unsteady_repeats_are_repeated_until_steady():
    meter, values = measured(Machine({(16, 64): [1.0, 1.0, 1.0, 90.0, 1.0, 80.0, 70.0]}))
    assert values == TRUE and meter.warnings == []


def test_unsteady_for_ever_is_a_warning():
    machine = Machine({(16, 64): [1.0, 1.0, *[1.0, 5.0, 9.0, 1.3, 1.2] * 40]})
    meter = Meter(machine.clock)
    assert meter.time_us("cell", machine.cell(16, 64), 5) == pytest.approx(70.5, abs=0.1)
    assert "cell: 4 measurements of 5 calls each stayed unsteady" in meter.warnings[0]


def test_names_are_reported_for_the_progress_display():
    names = []
    meter = Meter(lambda: 0.0, names.append)
    meter.table("cold", [1, 2], [3, 4], lambda rows, tokens: lambda: None, 1)
    assert names[0] == "cold, 1 rows x 3 tokens" and len(names) == 4


def test_a_table_made_while_the_machine_was_slow_is_made_again():
    machine = Machine()
    meter = Meter(machine.clock)
    reference_us = [100.0] * 9 + [900.0] * 9 + [105.0] * 9

    def reference() -> None:
        machine.now += reference_us.pop(0) / 1e6

    meter.set_reference(reference)
    num_cells = len(ROWS) * len(TOKENS)
    slow = iter([30.0] * num_cells * (Meter.WARMUP_CALLS + 5) + [1.0] * 1000)

    def cell(rows: int, tokens: int):
        def call() -> None:
            machine.now += (50 + rows * tokens * 0.02) * next(slow) / 1e6

        return call

    assert meter.table("gemm", ROWS, TOKENS, cell, repeats=5) == TRUE
    (warning,) = meter.warnings
    assert "9.0 times slower than before; measured again" in warning and not reference_us


def test_the_ratio_is_of_neighbours_in_time():
    machine = Machine()
    slowdown = [1.0]

    def call_of(us: float):
        def call() -> None:
            machine.now += us * slowdown[0] / 1e6
            slowdown[0] *= 1.01

        return call

    names = []
    meter = Meter(machine.clock, names.append)
    assert meter.ratio("gemm", call_of(100.0), call_of(80.0), 21) == pytest.approx(0.808)
    assert names == ["gemm"]
