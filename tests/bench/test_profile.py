"""Laws of the step profile: own times add up to the step, and switched off it does nothing."""

from __future__ import annotations

import time

import pytest
import torch

from sglang_ext.serving.profile import OTHER, StepProfile


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def one_step(profile: StepProfile) -> float:
    started = time.perf_counter()
    with profile.step():
        profile.label(["parallel", "parallel"])
        with profile.section("draft"):
            busy(0.002)
            with profile.section("draft head"):
                busy(0.004)
        busy(0.001)
    return 1000 * (time.perf_counter() - started)


def test_own_times_of_nested_sections_add_up_to_the_step() -> None:
    profile = StepProfile(True, "cpu")
    wall = one_step(profile) + one_step(profile)
    (entry,) = profile.to_dict()
    assert (entry["mode"], entry["batch"], entry["steps"]) == ("parallel", 2, 2)
    assert set(entry["ms"]) == {OTHER, "draft", "draft head"}
    assert entry["ms"]["draft head"] >= 8.0
    assert entry["ms"]["draft"] >= 4.0
    assert entry["ms"][OTHER] >= 2.0
    assert sum(entry["ms"].values()) <= wall


def test_steps_are_kept_apart_by_mode_and_batch_size() -> None:
    profile = StepProfile(True, "cpu")
    for modes in (["plain"], ["plain"], ["parallel"], ["plain", "parallel"]):
        with profile.step():
            profile.label(modes)
    seen = {(entry["mode"], entry["batch"]): entry["steps"] for entry in profile.to_dict()}
    assert seen == {("plain", 1): 2, ("parallel", 1): 1, ("mixed", 2): 1}


def test_a_watched_module_is_charged_for_its_calls() -> None:
    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            busy(0.003)
            return x

    profile, module = StepProfile(True, "cpu"), Slow()
    profile.watch(module, "target head")
    with profile.step():
        profile.label(["plain"])
        with profile.section("target"):
            module(torch.zeros(1))
    (entry,) = profile.to_dict()
    assert entry["ms"]["target head"] >= 3.0
    assert entry["ms"]["target"] < entry["ms"]["target head"]


def test_a_failed_step_does_not_disturb_the_next() -> None:
    profile = StepProfile(True, "cpu")
    with pytest.raises(RuntimeError), profile.step():
        profile.label(["plain"])
        with profile.section("target"):
            raise RuntimeError("out of memory")
    one_step(profile)
    (entry,) = profile.to_dict()
    assert entry["mode"] == "parallel"


def test_switched_off_it_attaches_and_keeps_nothing() -> None:
    profile, module = StepProfile(False, "cpu"), torch.nn.Identity()
    profile.watch(module, "target head")
    assert not module._forward_hooks and not module._forward_pre_hooks
    assert profile.section("a") is profile.section("b") is profile.step()
    one_step(profile)
    assert profile.to_dict() == []
