"""Laws of the step profile: own times add up to the step, and switched off it does nothing."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.serving import profile as module_under_test
from sglang_ext.serving.profile import OTHER, StepProfile


class Clock:
    """Stands in for the ``time`` module; moves only when told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def pass_ms(self, ms: float) -> None:
        self.seconds += ms / 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(module_under_test, "time", fake)
    return fake


def one_step(profile: StepProfile, clock: Clock) -> None:
    """A step of 7 ms: 2 of drafting, 4 of its head, 1 of neither."""
    with profile.step():
        profile.label(["parallel", "parallel"])
        with profile.section("draft"):
            clock.pass_ms(2)
            with profile.section("draft head"):
                clock.pass_ms(4)
        clock.pass_ms(1)


def test_own_times_of_nested_sections_add_up_to_the_step(clock: Clock) -> None:
    profile = StepProfile(True, "cpu")
    one_step(profile, clock)
    one_step(profile, clock)
    (entry,) = profile.to_dict()
    assert (entry["mode"], entry["batch"], entry["steps"]) == ("parallel", 2, 2)
    assert entry["ms"] == pytest.approx({OTHER: 2.0, "draft": 4.0, "draft head": 8.0})
    assert sum(entry["ms"].values()) == pytest.approx(1000 * clock.seconds)


def test_steps_are_kept_apart_by_mode_and_batch_size() -> None:
    profile = StepProfile(True, "cpu")
    for modes in (["plain"], ["plain"], ["parallel"], ["plain", "parallel"]):
        with profile.step():
            profile.label(modes)
    seen = {(entry["mode"], entry["batch"]): entry["steps"] for entry in profile.to_dict()}
    assert seen == {("plain", 1): 2, ("parallel", 1): 1, ("mixed", 2): 1}


def test_a_watched_module_is_charged_for_its_calls(clock: Clock) -> None:
    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            clock.pass_ms(3)
            return x

    profile, module = StepProfile(True, "cpu"), Slow()
    profile.watch(module, "target head")
    with profile.step():
        profile.label(["plain"])
        with profile.section("target"):
            clock.pass_ms(5)
            module(torch.zeros(1))
    (entry,) = profile.to_dict()
    assert entry["ms"] == pytest.approx({OTHER: 0.0, "target": 5.0, "target head": 3.0})


def test_a_failed_step_does_not_disturb_the_next(clock: Clock) -> None:
    profile = StepProfile(True, "cpu")
    with pytest.raises(RuntimeError), profile.step():
        profile.label(["plain"])
        with profile.section("target"):
            raise RuntimeError("out of memory")
    one_step(profile, clock)
    (entry,) = profile.to_dict()
    assert (entry["mode"], sum(entry["ms"].values())) == ("parallel", pytest.approx(7.0))


def test_switched_off_it_attaches_and_keeps_nothing(clock: Clock) -> None:
    profile, module = StepProfile(False, "cpu"), torch.nn.Identity()
    profile.watch(module, "target head")
    assert not module._forward_hooks and not module._forward_pre_hooks
    assert profile.section("a") is profile.section("b") is profile.step()
    one_step(profile, clock)
    assert profile.to_dict() == []


def test_nothing_waits_for_a_device_that_records_a_pass(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[bool] = []
    capturing = [True]
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(capturing[0]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    profile = StepProfile(True, "cuda")
    with profile.section("draft head"):
        clock.pass_ms(1)
    assert not waits
    capturing[0] = False
    one_step(profile, clock)
    assert waits == [False] * len(waits)
    assert len(waits) == 6
