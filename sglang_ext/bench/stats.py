"""The few statistics the reports need: paired ratios with confidence intervals, and where two outputs part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_ext.core.records import StepRecord

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A ratio and its confidence interval; ``low`` and ``high`` are None when one pair says nothing about the spread.

    Attributes:
        estimate: geometric mean of the paired ratios.
        low, high: ends of the interval at level 0.95.
        pairs: how many pairs it rests on.
    """

    estimate: float
    low: float | None
    high: float | None
    pairs: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.estimate:.2f}"
        return f"{self.estimate:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class PositionRate:
    """Acceptance of the draft at one position of the block.

    Attributes:
        position: 1 for the first draft after the bonus token.
        reached: times every earlier draft of its step was accepted and this one was verified.
        accepted: times it was accepted too.
        verified: times it was verified, whatever happened before it.
    """

    position: int
    reached: int
    accepted: int
    verified: int

    @property
    def conditional(self) -> float:
        """Probability of acceptance given that all earlier drafts were accepted; NaN if never reached."""
        return self.accepted / self.reached if self.reached else math.nan

    @property
    def marginal(self) -> float:
        """Share of verified drafts at this position that were accepted; NaN if never verified."""
        return self.accepted / self.verified if self.verified else math.nan


def t_quantile(dof: int, level: float = LEVEL) -> float:
    """Return t such that a Student variable with ``dof`` degrees of freedom lies in [-t, t] with probability ``level``.

    Raises:
        ValueError: if ``dof`` < 1 or ``level`` is not strictly between 0 and 1.
    """
    if dof < 1 or not 0.0 < level < 1.0:
        raise ValueError(f"dof={dof}, level={level}: dof >= 1 and 0 < level < 1 are allowed")
    low, high = 0.0, 1.0
    while _central_probability(high, dof) < level:
        high *= 2.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        if _central_probability(middle, dof) < level:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], level: float = LEVEL) -> Interval:
    """Return the geometric mean of ``numerators[i] / denominators[i]`` with a Student interval on the log ratios.

    Pairs are measurements of the same prompts under two configurations, so what the prompts have in common cancels.

    Raises:
        ValueError: if the lengths differ, are zero, or a value is not positive.
    """
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(f"{len(numerators)} and {len(denominators)} values: equally many, at least one, are allowed")
    if min(min(numerators), min(denominators)) <= 0.0:
        raise ValueError("every measurement must be positive")
    logs = [math.log(a / b) for a, b in zip(numerators, denominators, strict=True)]
    count = len(logs)
    mean = math.fsum(logs) / count
    if count == 1:
        return Interval(math.exp(mean), None, None, 1)
    variance = math.fsum((x - mean) ** 2 for x in logs) / (count - 1)
    half = t_quantile(count - 1, level) * math.sqrt(variance / count)
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), count)


def acceptance_by_position(records: Iterable[StepRecord]) -> list[PositionRate]:
    """Count acceptance for each draft position over the verification steps in ``records``."""
    verified: list[int] = []
    reached: list[int] = []
    accepted: list[int] = []
    for record in records:
        while len(verified) < record.verify_length:
            verified.append(0)
            reached.append(0)
            accepted.append(0)
        for slot in range(record.verify_length):
            verified[slot] += 1
            reached[slot] += slot <= record.accepted
            accepted[slot] += slot < record.accepted
    return [
        PositionRate(slot + 1, *counts) for slot, counts in enumerate(zip(reached, accepted, verified, strict=True))
    ]


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Return the first index at which two token sequences part (a missing token counts), or None if they are equal."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def _central_probability(t: float, dof: int) -> float:
    """P(-t <= T <= t) for integer degrees of freedom: the finite sums in sine and cosine of atan(t / sqrt(dof))."""
    theta = math.atan2(t, math.sqrt(dof))
    cosine_squared = math.cos(theta) ** 2
    if dof % 2:
        if dof == 1:
            return 2.0 * theta / math.pi
        term = total = math.cos(theta)
        for k in range(3, dof - 1, 2):
            term *= cosine_squared * (k - 1) / k
            total += term
        return 2.0 / math.pi * (theta + math.sin(theta) * total)
    term = total = 1.0
    for k in range(2, dof - 1, 2):
        term *= cosine_squared * (k - 1) / k
        total += term
    return math.sin(theta) * total
