"""The step table: parts add up to the step, and what belongs to the host is what is left."""

from __future__ import annotations

import pytest

from sglang_ext.bench.client import Completion
from sglang_ext.bench.memory import Footprint, allowed
from sglang_ext.bench.memory import table as memory_table
from sglang_ext.bench.runner import OVERRIDE, PLAIN
from sglang_ext.bench.steps import PARTS, StepTimes, difference, step_times, table

PROFILE = {"steps": 10, "target": 200.0, "target head": 20.0, "draft": 30.0, "draft head": 15.0, "sampling": 5.0,
           "plan": 4.0, "prepare": 3.0, "context": 2.0, "other": 1.0}  # fmt: skip


def answers(tokens: int, seconds: float) -> list[Completion]:
    return [Completion(tuple(range(tokens)), "", 0.0, 1.0, 1.0 + seconds, "length")]


def test_parts_and_host_add_up_to_what_the_client_sees() -> None:
    times = step_times("parallel", answers(21, 0.3), [PROFILE])
    assert times.step_ms == pytest.approx(30.0)
    assert times.worker_ms == pytest.approx(28.0)
    assert times.host_ms == pytest.approx(2.0)
    assert times.tokens_per_step == pytest.approx(2.0)
    assert times.parts_ms["plugin bookkeeping"] == pytest.approx(0.8)


def test_every_profiled_section_is_in_exactly_one_part() -> None:
    sections = [section for group in PARTS.values() for section in group]
    assert sorted(sections) == sorted(set(PROFILE) - {"steps"})


def test_a_plain_server_has_one_step_per_token() -> None:
    times = step_times(PLAIN, answers(11, 0.25), [{"steps": 0}])
    assert (times.steps, times.tokens_per_step, times.parts_ms) == (10, 1.0, {})
    assert times.step_ms == pytest.approx(25.0)


def test_readings_are_subtracted_section_by_section() -> None:
    assert difference({"steps": 5, "target": 50.0, "draft": 4.0}, {"steps": 2, "target": 20.0}) == {
        "steps": 3,
        "target": 30.0,
        "draft": 4.0,
    }


def test_the_table_judges_bookkeeping_by_a_plain_step() -> None:
    parts = dict.fromkeys(PARTS, 1.0)
    lines = table([StepTimes(OVERRIDE, 9, 1.0, parts, 8.0), StepTimes(PLAIN, 9, 1.0, {}, 20.0)])
    assert any("1.00 ms a step, 5.0 % of a plain step (20.00 ms)" in line for line in lines)
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


@pytest.mark.parametrize(("resident", "word"), [(1124, "within"), (1126, "ABOVE")])
def test_the_memory_verdict_is_plain_plus_drafter_plus_a_tenth(resident: int, word: str) -> None:
    mib = 2**20
    plain = Footprint("plain", 1000 * mib, 900 * mib, 1000 * mib, 100, 0, 0)
    fast = Footprint("flexdraft", resident * mib, 900 * mib, 1200 * mib, 100, 20 * mib, 5 * mib)
    assert allowed(plain, fast) == pytest.approx(1125 * mib)
    assert word in memory_table(plain, fast)[-1]
