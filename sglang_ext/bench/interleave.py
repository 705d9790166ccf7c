"""The order of measurements: whole rounds of the same prompts, each run under every arm before the next round starts.

Slow drifts of the machine (temperature, other processes) then hit all arms alike, and the arms' order rotates so that
none is always first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext.bench.datasets import Prompt


@dataclass(frozen=True)
class Block:
    """One timed unit: one round's prompts, sent together to one arm.

    Attributes:
        dataset: name of the prompts' dataset.
        batch: requests in flight at once (= number of prompts).
        round_index: which round; blocks with equal (dataset, batch, round_index) are compared with each other.
        arm: name of the configuration that answers.
        prompts: the prompts.
    """

    dataset: str
    batch: int
    round_index: int
    arm: str
    prompts: tuple[Prompt, ...]


def round_count(prompts: int, batch: int, minimum: int) -> int:
    """Return how many rounds of ``batch`` requests cover ``prompts`` prompts, at least ``minimum``."""
    return max(minimum, math.ceil(prompts / batch))


def rounds(prompts: Sequence[Prompt], batch: int, count: int) -> list[tuple[Prompt, ...]]:
    """Cut ``count`` rounds of ``batch`` prompts, starting over from the first when the prompts run out."""
    return [
        tuple(prompts[(index * batch + offset) % len(prompts)] for offset in range(batch)) for index in range(count)
    ]


def arm_order(arms: Sequence[str], round_index: int) -> list[str]:
    """Return the order of the arms in one round.

    In any ``len(arms)`` rounds that start at a multiple of it, every arm runs once at every place; every second such
    group runs in reverse, so that no arm always follows the same one.
    """
    count = len(arms)
    shift = round_index % count
    order = [*arms[shift:], *arms[:shift]]
    return order[::-1] if (round_index // count) % 2 else order


@dataclass(frozen=True)
class Size:
    """How much to measure.

    Attributes:
        batches: batch sizes.
        prompts: prompts per dataset and batch size; a larger batch size takes more if its rounds need them.
        minimum_rounds: rounds per dataset and batch size, at least.
    """

    batches: tuple[int, ...]
    prompts: int
    minimum_rounds: int

    @property
    def pool(self) -> int:
        """Prompts per dataset that fill every round without using one twice."""
        return max(batch * round_count(self.prompts, batch, self.minimum_rounds) for batch in self.batches)


def schedule(prompts: Sequence[Prompt], arms: Sequence[str], size: Size) -> list[Block]:
    """Return every block of one dataset in the order to run it: by batch size, then round, then arm."""
    blocks = []
    for batch in size.batches:
        count = round_count(size.prompts, batch, size.minimum_rounds)
        for index, chosen in enumerate(rounds(prompts, batch, count)):
            blocks += [Block(prompts[0].dataset, batch, index, arm, chosen) for arm in arm_order(arms, index)]
    return blocks
