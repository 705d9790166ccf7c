"""Replays show what had arrived, at most so often, and end exactly."""

from __future__ import annotations

import asyncio
import re
import time
from itertools import pairwise

import pytest

from demo.client import Client
from demo.clock import UPDATE_INTERVAL_S, ReplayClock, Throttle, visible
from demo.facts import Facts
from demo.frames import Frame, final, redraw_factor, replay
from demo.runs import Endpoint
from demo.settings import FAST_SIDE, SIDES
from demo.texts import Vocabulary
from tests.demo.recorded import recording


def test_visible_is_what_had_arrived() -> None:
    steps = recording().tracks[FAST_SIDE].steps
    for position in (0.0, 0.1, steps[4].at_s, 1.0, 99.0):
        assert [step.at_s for step in visible(steps, position)] == [s.at_s for s in steps if s.at_s <= position]


def test_clock_runs_at_its_speed() -> None:
    clock = ReplayClock(10.0, 0.5)
    assert [clock.position(now) for now in (9.0, 10.0, 14.0)] == [0.0, 0.0, 2.0]


def test_throttle_allows_at_most_twenty_a_second() -> None:
    throttle = Throttle(UPDATE_INTERVAL_S)
    assert sum(throttle.due(tick / 1000) for tick in range(1000)) <= 20
    assert throttle.due(5.0)


def collect(run: object, speed: float, stop_after: int | None = None) -> list[Frame]:
    async def play() -> list[Frame]:
        frames: list[Frame] = []
        async for frame in replay(run, speed, lambda: stop_after is not None and len(frames) >= stop_after):
            frames.append(frame)
        return frames

    return asyncio.run(play())


def test_two_thousand_tokens_at_500_a_second() -> None:
    """Law D5: at most 20 updates a second, each adding to the one before, and the end is exact."""
    run = recording(tokens=2000, rate=500.0)
    track = run.tracks[FAST_SIDE]
    fast = type(run)(
        run.settings, run.servers, {**run.tracks, "plain": recording(10, 30.0).tracks["plain"]}, run.verdict, ""
    )
    started = time.monotonic()
    frames = collect(fast, 1.0)
    seconds = time.monotonic() - started
    assert len(frames) <= 20 * seconds + 2, f"{len(frames)} updates in {seconds:.1f} s"
    flows = [frame.flows[FAST_SIDE] for frame in frames]
    assert all(after.startswith(before) for before, after in pairwise(flows))
    assert flows[-1] == final(fast).flows[FAST_SIDE]
    assert flows[-1].count("\n") + 1 == len(track.steps)
    coloured = sum(len(re.findall(rf'class="t {kind}[ "]', flows[-1])) for kind in "abp")
    assert coloured == 2000 == len(track.ids)


def test_a_stopped_replay_ends_with_the_whole_run() -> None:
    run = recording(tokens=200, rate=10.0)
    frames = collect(run, 1.0, stop_after=2)
    assert len(frames) == 3
    assert [frames[-1].flows[side] for side in SIDES] == [final(run).flows[side] for side in SIDES]


@pytest.mark.parametrize(
    ("url", "device", "rarer"),
    (
        ("http://127.0.0.1:1", "cpu", True),
        ("http://127.0.0.1:1", "cuda", False),
        ("http://far.example:1", "cpu", False),
    ),
)
def test_a_model_on_the_cores_that_draw_is_drawn_less_often(url: str, device: str, rarer: bool) -> None:
    client = Client(url)
    endpoint = Endpoint(client, Facts(url, "m", device=device), Vocabulary(client.detokenize))
    assert (redraw_factor([endpoint]) > 1.0) == rarer
