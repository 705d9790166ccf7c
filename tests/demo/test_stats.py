"""Figures of an answer, against hand counts and against conservation laws."""

from __future__ import annotations

import random

import pytest

from demo import stats
from demo.steps import Step
from tests.demo.recorded import answer, record, step

STEPS = [
    step(0.5, record("prefill", (), 0, 1, step_ms=300.0)),
    step(1.0, record("parallel", (2, 3, 9), 2, 4)),
    step(1.5, record("parallel", (9,), 0, 5)),
    step(2.0, record("plain", (), 0, 6)),
    step(2.5, record("sequential", (7, 8), 2, 9), keep=2),
]


def test_counts_by_hand() -> None:
    counts = stats.count(STEPS)
    assert (counts.tokens, counts.accepted, counts.bonus, counts.plain) == (8, 4, 2, 2)
    assert (counts.proposed, counts.rejected, counts.passes) == (6, 2, 4)
    assert counts.accept_length == 2.0


def test_timing_keeps_prefill_and_queue_apart() -> None:
    timing = stats.time(STEPS)
    assert timing is not None
    assert (timing.first_s, timing.prefill_s, timing.decode_s, timing.decode_tokens) == (0.5, 0.3, 2.0, 7)
    assert timing.queue_s == pytest.approx(0.2)
    assert timing.rate == pytest.approx(3.5)
    assert stats.time([]) is None
    assert stats.time(STEPS[:1]).rate is None


def test_distributions_by_hand() -> None:
    assert stats.accept_histogram(STEPS) == [1, 0, 2]
    assert stats.slot_acceptance(STEPS) == [(2, 3), (2, 2), (0, 1)]
    assert stats.accept_histogram([]) == []
    assert stats.mode_spans(STEPS) == [
        ("prefill", 0.0, 0.5),
        ("parallel", 0.5, 1.5),
        ("plain", 1.5, 2.0),
        ("sequential", 2.0, 2.5),
    ]


def test_speedup_is_a_ratio_of_decoding_rates() -> None:
    plain = [Step(0.2, (1,), ("a",)), Step(2.2, (2,) * 7, ("a",) * 7)]
    assert stats.speedup(STEPS, plain) == pytest.approx(1.0)
    assert stats.speedup(STEPS, plain[:1]) is None


def test_without_telemetry_there_is_no_accept_length() -> None:
    counts = stats.count([Step(0.2, (1,), ("a",)), Step(0.4, (2,), ("a",))])
    assert counts.tokens == counts.plain == 2
    assert counts.accept_length is None


def test_everything_committed_and_everything_proposed_is_counted_once() -> None:
    seed = random.randrange(10_000)
    print(f"seed {seed}")
    steps = answer(300, 40.0, True, seed)
    for end in range(len(steps) + 1):
        counts = stats.count(steps[:end])
        assert counts.accepted + counts.bonus + counts.plain == counts.tokens == sum(len(s.ids) for s in steps[:end])
        assert counts.accepted + counts.rejected == counts.proposed
        histogram = stats.accept_histogram(steps[:end])
        assert sum(index * number for index, number in enumerate(histogram)) == counts.accepted
        assert sum(verified for _, verified in stats.slot_acceptance(steps[:end])) == counts.proposed
        assert sum(accepted for accepted, _ in stats.slot_acceptance(steps[:end])) == counts.accepted
