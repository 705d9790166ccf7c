"""Laws of the statistics: intervals cover, ratios are symmetric, acceptance counts add up."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from sglang_ext.bench.stats import acceptance_by_position, first_difference, ratio_interval, t_quantile
from sglang_ext.core.records import StepRecord


@pytest.mark.parametrize(
    ("dof", "level", "expected"),
    [
        (1, 0.95, 12.706),
        (2, 0.95, 4.303),
        (3, 0.95, 3.182),
        (4, 0.99, 4.604),
        (5, 0.95, 2.571),
        (10, 0.90, 1.812),
        (29, 0.95, 2.045),
        (30, 0.95, 2.042),
        (100000, 0.95, 1.960),
    ],
)
def test_t_quantiles_are_those_of_the_printed_tables(dof: int, level: float, expected: float) -> None:
    assert t_quantile(dof, level) == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize(("dof", "level"), [(0, 0.95), (3, 0.0), (3, 1.0)])
def test_an_impossible_quantile_is_refused(dof: int, level: float) -> None:
    with pytest.raises(ValueError, match="dof"):
        t_quantile(dof, level)


def test_equal_ratios_have_an_interval_of_no_width() -> None:
    interval = ratio_interval([3.0, 6.0, 30.0], [2.0, 4.0, 20.0])
    assert interval.estimate == pytest.approx(1.5)
    assert interval.low == pytest.approx(1.5)
    assert interval.high == pytest.approx(1.5)
    assert interval.pairs == 3


def test_exchanging_the_arms_inverts_the_interval() -> None:
    a, b = [31.0, 29.0, 35.5, 30.1], [20.0, 22.0, 19.5, 21.0]
    forward, backward = ratio_interval(a, b), ratio_interval(b, a)
    assert forward.estimate == pytest.approx(1 / backward.estimate)
    assert forward.low is not None and backward.high is not None
    assert forward.low == pytest.approx(1 / backward.high)


def test_one_pair_has_no_interval() -> None:
    interval = ratio_interval([3.0], [2.0])
    assert (interval.low, interval.high, str(interval)) == (None, None, "1.50")


def test_the_interval_covers_the_truth_as_often_as_it_claims() -> None:
    seed = 20260
    print(f"seed {seed}")
    draw = random.Random(seed)
    truth, trials, hits = 1.7, 4000, 0
    for _ in range(trials):
        slow = [math.exp(draw.gauss(3.0, 0.5)) for _ in range(6)]
        fast = [value * truth * math.exp(draw.gauss(0.0, 0.1)) for value in slow]
        interval = ratio_interval(fast, slow)
        assert interval.low is not None and interval.high is not None
        hits += interval.low <= truth <= interval.high
    # Four standard errors of a binomial with p = 0.95.
    assert abs(hits / trials - 0.95) < 4 * math.sqrt(0.95 * 0.05 / trials)


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0]), ([1.0, 0.0], [1.0, 1.0])])
def test_measurements_without_a_ratio_are_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError):
        ratio_interval(a, b)


def record(verify_length: int, accepted: int) -> StepRecord:
    return StepRecord("parallel", verify_length, (0,) * verify_length, accepted, 1, 1, (1.0,) * verify_length, 1.0, 1)


def test_acceptance_by_position_counts_every_verified_draft_once() -> None:
    seed = 7
    print(f"seed {seed}")
    draw = random.Random(seed)
    records = []
    for _ in range(500):
        length = draw.randint(0, 7)
        records.append(record(length, draw.randint(0, length)))
    rates = acceptance_by_position(records)
    assert sum(rate.verified for rate in rates) == sum(item.verify_length for item in records)
    assert sum(rate.accepted for rate in rates) == sum(item.accepted for item in records)
    for rate in rates:
        assert rate.accepted <= rate.reached <= rate.verified
    for before, after in pairwise(rates):
        # A position is reached only by steps that accepted the one before it.
        assert after.reached <= before.accepted


def test_a_rate_that_was_never_reached_is_not_a_number() -> None:
    rates = acceptance_by_position([record(2, 0), record(2, 0)])
    assert rates[0].conditional == 0.0
    assert math.isnan(rates[1].conditional)
    assert rates[1].marginal == 0.0


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [5], 0)],
)
def test_first_difference(a: list[int], b: list[int], expected: int | None) -> None:
    assert first_difference(a, b) == expected
    assert first_difference(b, a) == expected
