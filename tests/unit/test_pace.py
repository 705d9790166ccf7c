"""Laws of mode ``auto``: near the fastest mode, never clearly slower than plain decoding."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from sglang_ext.core.costs import ENOUGH_STEPS, AcceptLengths, StepCosts, bucket
from sglang_ext.core.pace import Pace
from sglang_ext.core.schedule import Mode, ModePolicy

PLAIN, SEQUENTIAL, PARALLEL = Mode.PLAIN, Mode.SEQUENTIAL, Mode.PARALLEL


class Machine:
    """A simulated server: steps of known cost, drafts of known worth, and the worker's calls in the worker's order."""

    def __init__(self, pace: Pace, costs: dict[Mode, float], seed: int = 0, drift_s: float = 0.0) -> None:
        self.pace, self.costs = pace, costs
        #: Period in which the machine becomes a third slower and as fast as before again; 0: never.
        self.drift_s = drift_s
        self.random = random.Random(seed)
        #: Whether a prompt is read before every step.
        self.crowded = False
        #: Requests of every batch that are decoded plainly whatever is chosen.
        self.plain_requests = 0
        self.now = 0.0
        self.used: Counter[Mode] = Counter()
        self.drafted: set[str] = set()

    def serve(self, name: str, tokens: int, accept_length: float, batch: int = 1) -> float:
        """Decode ``batch`` equal requests; returns ms per token of one of them."""
        self.pace.interrupted()
        began, done = self.now, 0.0
        names = [f"{name}/{i}" for i in range(batch)]
        self.drafted = set(names) if self.pace.drafts_after_prefill() else set()
        while done < tokens:
            mode = self.pace.choose(names, batch + self.plain_requests)
            self.pace.started(self.now, [mode] * batch + [PLAIN] * self.plain_requests)
            self.used[mode] += 1
            self.now += self.costs[mode] * self.random.uniform(0.9, 1.1) * self.slowness()
            self.pace.ended(self.now)
            if self.crowded:
                self.pace.interrupted()
            gained = 0
            for request in names:
                if mode is PLAIN or request not in self.drafted:
                    committed = 1
                else:
                    whole = int(accept_length)
                    committed = whole + (self.random.random() < accept_length - whole)
                    self.pace.committed(request, committed)
                gained += committed
            done += gained / batch
            self.drafted = set() if mode is PLAIN else set(names)
        return (self.now - began) / tokens

    def slowness(self) -> float:
        phase = self.now / 1000.0 / self.drift_s if self.drift_s else 0.0
        return 1.15 - 0.15 * math.cos(2 * math.pi * phase)


def pace(**thresholds: object) -> Pace:
    return Pace(ModePolicy(**{"parallel_max_batch": 1, **thresholds}), can_join=True, adaptive=True)


def forced(mode: Mode) -> Pace:
    return Pace(ModePolicy(mode=mode.value), can_join=True, adaptive=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("accept_length", [1.0, 1.3, 1.55, 1.7, 2.3, 4.0])
def test_no_text_is_decoded_clearly_slower_than_plainly(accept_length: float, seed: int) -> None:
    costs = {PLAIN: 76.0, SEQUENTIAL: 123.0, PARALLEL: 128.0}
    machine = Machine(pace(), costs, seed)
    spent = [machine.serve(f"r{i}", 150, accept_length) for i in range(40)]
    mean = sum(spent) / len(spent)
    best = min(costs[PLAIN], costs[SEQUENTIAL] / accept_length)
    assert mean <= 1.04 * costs[PLAIN]
    assert mean <= 1.07 * best
    if accept_length >= 2.3:
        assert machine.used[SEQUENTIAL] > machine.used[PARALLEL] > 0  # both tried, the faster one kept
        assert machine.used[PLAIN] < 0.06 * sum(machine.used.values())


@pytest.mark.parametrize("drift_s", [30.0, 120.0, 600.0])
@pytest.mark.parametrize("accept_length", [1.3, 1.55, 2.3])
def test_a_machine_whose_speed_drifts_is_judged_as_one_that_is_steady(accept_length: float, drift_s: float) -> None:
    costs = {PLAIN: 76.0, SEQUENTIAL: 123.0, PARALLEL: 128.0}
    machine, plain = Machine(pace(), costs, 1, drift_s), Machine(forced(PLAIN), costs, 2, drift_s)
    for i in range(60):
        machine.serve(f"r{i}", 100, accept_length)
        plain.serve(f"r{i}", 100, accept_length)
    best = min(1.0, costs[SEQUENTIAL] / accept_length / costs[PLAIN])
    assert machine.now <= 1.06 * best * plain.now


@pytest.mark.parametrize("plain_requests", [0, 1])
@pytest.mark.parametrize("crowded", [False, True])
def test_a_busy_server_learns_too(crowded: bool, plain_requests: int) -> None:
    """A prompt before every step, or a request that must be decoded plainly in every batch, hides no mode for ever."""
    for accept_length, most in ((1.0, 1.05), (2.6, 0.8)):
        costs = {PLAIN: 50.0, SEQUENTIAL: 75.0, PARALLEL: 76.0}
        machine, plain = Machine(pace(), costs), Machine(forced(PLAIN), costs)
        for each in (machine, plain):
            each.crowded, each.plain_requests = crowded, plain_requests
            for i in range(30):
                each.serve(f"r{i}", 100, accept_length, batch=3)
        assert machine.now <= most * plain.now, (accept_length, machine.used)


@pytest.mark.parametrize("accept_length", [1.2, 1.4, 1.5])
def test_short_answers_are_not_slowed_by_hope(accept_length: float) -> None:
    costs = {PLAIN: 50.0, SEQUENTIAL: 81.0, PARALLEL: 85.0}
    machine, plain = Machine(pace(), costs), Machine(forced(PLAIN), costs)
    for i in range(400):
        machine.serve(f"r{i}", 8, accept_length)
        plain.serve(f"r{i}", 8, accept_length)
    assert machine.now <= 1.04 * plain.now


def test_a_mode_that_became_dear_is_noticed_although_another_one_is_tried_beside_it() -> None:
    costs = {PLAIN: 50.0, SEQUENTIAL: 60.0, PARALLEL: 62.0}
    machine = Machine(pace(), costs)
    machine.serve("before", 2000, 2.2)
    machine.costs = {PLAIN: 50.0, SEQUENTIAL: 130.0, PARALLEL: 132.0}
    machine.serve("change", 4000, 2.2)
    machine.used.clear()
    machine.serve("after", 1000, 2.2)
    assert machine.used[PLAIN] > 0.95 * sum(machine.used.values())


def test_nothing_is_drafted_where_the_user_forbids_it() -> None:
    never = pace(plain_min_batch=1)
    assert never.choose(["a"], 1) is PLAIN
    assert not never.drafts_after_prefill()


def test_a_larger_batch_is_judged_by_the_smaller_ones_until_it_is_timed() -> None:
    chooser = pace()
    Machine(chooser, {PLAIN: 76.0, SEQUENTIAL: 150.0, PARALLEL: 152.0}).serve("one", 300, 1.2)
    large = Machine(chooser, {PLAIN: 100.0, SEQUENTIAL: 300.0})
    large.serve("many", 100, 1.2, batch=16)
    assert large.used[SEQUENTIAL] == 0, "drafting does not pay alone, so it was not tried on sixteen"


def test_a_request_worth_drafting_for_is_found_among_others_that_are_not() -> None:
    costs = {PLAIN: 76.0, SEQUENTIAL: 123.0, PARALLEL: 140.0}
    machine = Machine(pace(), costs)
    for i in range(20):
        machine.serve(f"chat{i}", 150, 1.4)
    assert machine.serve("math", 400, 2.6) < 0.9 * costs[PLAIN]
    assert sum(machine.serve(f"more{i}", 150, 1.4) for i in range(20)) / 20 < 1.04 * costs[PLAIN]


def test_each_batch_size_is_judged_by_itself() -> None:
    chooser = pace()
    small = Machine(chooser, {PLAIN: 76.0, SEQUENTIAL: 110.0, PARALLEL: 100.0})
    large = Machine(chooser, {PLAIN: 100.0, SEQUENTIAL: 300.0})
    for i in range(10):
        small.serve(f"small{i}", 100, 2.0)
        large.serve(f"large{i}", 100, 2.0, batch=16)
    assert small.used[PARALLEL] > 0.8 * sum(small.used.values())
    assert large.used[PLAIN] > 0.8 * sum(large.used.values())


def test_a_useless_drafter_is_hardly_tried_again() -> None:
    machine = Machine(pace(), {PLAIN: 50.0, SEQUENTIAL: 100.0, PARALLEL: 100.0})
    machine.serve("first", 300, 1.0)
    machine.used.clear()
    for i in range(100):
        machine.serve(f"r{i}", 100, 1.0)
    assert machine.used[PLAIN] > 0.99 * sum(machine.used.values())


def test_limits_and_names_of_the_user_hold() -> None:
    for name in Mode:
        chooser = forced(name)
        assert {chooser.choose(["a"], size) for size in (1, 2, 64)} == {name}
    limited = Machine(pace(parallel_max_batch=0, plain_min_batch=4), {PLAIN: 50.0, SEQUENTIAL: 60.0})
    assert limited.pace.drafts_after_prefill()
    limited.serve("few", 300, 3.0, batch=3)
    assert limited.used[PARALLEL] == 0 < limited.used[SEQUENTIAL]
    limited.used.clear()
    limited.serve("many", 100, 3.0, batch=4)
    assert set(limited.used) == {PLAIN}
    fixed = Pace(ModePolicy(), can_join=True, adaptive=False)
    assert [fixed.choose(["a"] * size, size) for size in (1, 2, 3)] == [PARALLEL, PARALLEL, SEQUENTIAL]
    alone = Pace(ModePolicy(), can_join=False, adaptive=False)
    assert alone.choose(["a"], 1) is SEQUENTIAL


def test_what_cannot_be_told_from_a_step_is_not_measured() -> None:
    chooser = Pace(ModePolicy(mode="auto"), can_join=True, adaptive=True)
    chooser.started(0.0, [SEQUENTIAL])
    chooser.interrupted()  # nobody knows when it ended
    chooser.started(500.0, [SEQUENTIAL])
    assert chooser.costs.to_dict() == []
    chooser.started(600.0, [SEQUENTIAL, PARALLEL])
    chooser.started(650.0, [SEQUENTIAL, PLAIN, PLAIN])
    chooser.started(700.0, [PLAIN])
    assert chooser.costs.to_dict() == [{"mode": "sequential", "batch": 1, "ms": 100.0, "steps": 1, "plain_steps": None}]


def test_a_step_before_a_prefill_ends_where_the_worker_left_it() -> None:
    chooser = Pace(ModePolicy(mode="auto"), can_join=True, adaptive=True)
    chooser.started(0.0, [SEQUENTIAL, SEQUENTIAL, PLAIN])
    chooser.ended(80.0)
    chooser.interrupted()
    chooser.started(5000.0, [PLAIN])
    assert chooser.costs.to_dict() == [{"mode": "sequential", "batch": 4, "ms": 80.0, "steps": 1, "plain_steps": None}]


def test_batches_share_a_bucket_up_to_the_next_power_of_two() -> None:
    assert [bucket(size) for size in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
    costs = StepCosts()
    for ms in (10.0, 11.0, 900.0):
        costs.add(PLAIN, 3, ms)
    assert costs.ms(PLAIN, 4) == 11.0
    assert costs.fresh(PLAIN, 4)
    assert not costs.fresh(PLAIN, 5)


def test_modes_are_compared_by_times_taken_close_together() -> None:
    costs = StepCosts()
    assert costs.relative(PLAIN, 1) == 1.0
    assert costs.relative(SEQUENTIAL, 1) is None
    for _ in range(ENOUGH_STEPS):
        costs.add(PLAIN, 1, 50.0)
    for _ in range(ENOUGH_STEPS - 1):
        costs.add(SEQUENTIAL, 1, 75.0)
    assert not costs.known(SEQUENTIAL, 1)
    costs.add(SEQUENTIAL, 1, 75.0)
    assert costs.relative(SEQUENTIAL, 1) == 1.5
    for ms in [75.0] * 40 + [150.0] * 40:  # the machine became twice as slow, which says nothing about the ratio
        costs.add(SEQUENTIAL, 1, ms)
    assert costs.relative(SEQUENTIAL, 1) == 1.5
    for _ in range(ENOUGH_STEPS):
        costs.add(PARALLEL, 1, 160.0)  # beside a mode of known cost
    assert costs.relative(PARALLEL, 1) == pytest.approx(1.6)
    for _ in range(ENOUGH_STEPS):
        costs.add(PLAIN, 1, 100.0)
    assert costs.relative(SEQUENTIAL, 1) == 1.5


def test_one_odd_comparison_does_not_decide() -> None:
    costs = StepCosts()
    for plain_ms in (50.0, 50.0, 90.0):
        for _ in range(40):
            costs.add(SEQUENTIAL, 4, 75.0)
        for _ in range(ENOUGH_STEPS):
            costs.add(PLAIN, 4, plain_ms)
    assert costs.relative(SEQUENTIAL, 4) == 1.5


def test_a_batch_size_never_timed_borrows_from_the_next_smaller_else_larger() -> None:
    costs = StepCosts()
    for size, ms in ((2, 60.0), (8, 100.0)):
        for _ in range(ENOUGH_STEPS):
            costs.add(PLAIN, size, 50.0)
        for _ in range(ENOUGH_STEPS):
            costs.add(SEQUENTIAL, size, ms)
    assert [costs.relative(SEQUENTIAL, size) for size in (1, 2, 4, 8, 64)] == [1.2, 1.2, 1.2, 2.0, 2.0]
    assert not costs.known(SEQUENTIAL, 4)


def test_expectations_follow_a_request_and_start_from_the_others() -> None:
    accepts = AcceptLengths()
    for _ in range(200):
        accepts.add("steady", 3)
    assert accepts.mean == pytest.approx(3.0, abs=0.05)
    assert accepts.expected(["new"]) == pytest.approx(1.3 * accepts.mean)
    assert accepts.expected(["steady"]) == pytest.approx(3.0, rel=0.05)
    for _ in range(60):
        accepts.add("poor", 1)
    assert accepts.expected(["poor"]) < 1.3
