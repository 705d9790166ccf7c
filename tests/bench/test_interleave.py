"""Laws of the order of measurements."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from sglang_ext.bench.datasets import Prompt
from sglang_ext.bench.interleave import Size, arm_order, round_count, rounds, schedule

ARMS = ("flexdraft", "plain request", "plain server")


def prompts(count: int) -> list[Prompt]:
    return [Prompt("d", f"d/{number}", f"text {number}", (number,)) for number in range(count)]


@pytest.mark.parametrize("arms", [ARMS[:2], ARMS])
def test_every_arm_runs_equally_often_at_every_place(arms: tuple[str, ...]) -> None:
    places = Counter((place, arm) for index in range(2 * len(arms)) for place, arm in enumerate(arm_order(arms, index)))
    assert set(places.values()) == {2}


def test_no_arm_always_follows_the_same_one() -> None:
    followers = {arm: set() for arm in ARMS}
    for index in range(6):
        order = arm_order(ARMS, index)
        for before, after in pairwise(order):
            followers[after].add(before)
    assert all(len(before) == 2 for before in followers.values())


def test_a_round_is_finished_under_all_arms_before_the_next_begins() -> None:
    size = Size((1, 4), prompts=6, minimum_rounds=3)
    blocks = schedule(prompts(size.pool), ARMS, size)
    for start in range(0, len(blocks), len(ARMS)):
        group = blocks[start : start + len(ARMS)]
        assert {block.arm for block in group} == set(ARMS)
        assert len({(block.batch, block.round_index, block.prompts) for block in group}) == 1


@pytest.mark.parametrize(
    ("count", "batch", "minimum", "expected"), [(10, 1, 3, 10), (10, 4, 3, 3), (10, 16, 3, 3), (9, 2, 1, 5)]
)
def test_rounds_cover_the_prompts_and_respect_the_minimum(count: int, batch: int, minimum: int, expected: int) -> None:
    assert round_count(count, batch, minimum) == expected


def test_the_pool_fills_every_round_without_using_a_prompt_twice() -> None:
    size = Size((1, 4, 16), prompts=10, minimum_rounds=3)
    assert size.pool == 48
    for batch in size.batches:
        chosen = [prompt for group in rounds(prompts(size.pool), batch, 3) for prompt in group]
        assert len(set(chosen)) == len(chosen)


def test_a_short_dataset_starts_over() -> None:
    names = [[prompt.name for prompt in group] for group in rounds(prompts(3), 2, 3)]
    assert names == [["d/0", "d/1"], ["d/2", "d/0"], ["d/1", "d/2"]]
