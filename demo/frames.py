"""What the page shows at one moment, and the order of moments while a run goes on or is replayed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass

from demo import view
from demo.clock import PLOT_INTERVAL_S, SHARED_CORES_FACTOR, UPDATE_INTERVAL_S, ReplayClock, Throttle, visible
from demo.facts import Facts
from demo.identity import OPEN, Verdict
from demo.plots import plots
from demo.recording import Recording
from demo.runs import Endpoint, Run
from demo.settings import FAST_SIDE, PLAIN_SIDE, SIDES, TURNS, Settings
from demo.summary import summary
from demo.tracks import RUNNING, Track

TICK_S = 0.02


@dataclass(frozen=True)
class Frame:
    """The HTML of one moment: head, text and strip of both panels, summary, plots (``None``: leave as they are)."""

    heads: dict[str, str]
    flows: dict[str, str]
    strips: dict[str, str]
    summary: str
    plots: str | None


@dataclass(frozen=True)
class Scene:
    """What a frame is drawn from.

    Attributes:
        settings, servers, tracks, verdict: of the run.
        positions: how far into each track the page is, in seconds; ``None`` shows everything.
        notes: what each panel does now, where its own state would mislead.
    """

    settings: Settings
    servers: Mapping[str, Facts]
    tracks: Mapping[str, Track]
    verdict: Verdict
    positions: Mapping[str, float | None]
    notes: Mapping[str, str]


def draw(scene: Scene, with_plots: bool) -> Frame:
    """Draw one frame."""
    shown = {}
    for side in SIDES:
        steps, position = list(scene.tracks[side].steps), scene.positions[side]
        shown[side] = steps if position is None else visible(steps, position)
    return Frame(
        heads={side: view.head(scene.tracks[side], shown[side], scene.notes.get(side, "")) for side in SIDES},
        flows={side: view.flow(shown[side]) for side in SIDES},
        strips={side: view.strip(shown[side]) if side == FAST_SIDE else "" for side in SIDES},
        summary=summary(scene.settings, scene.servers, scene.tracks, scene.verdict, shown[FAST_SIDE]),
        plots=plots(shown[PLAIN_SIDE], shown[FAST_SIDE]) if with_plots else None,
    )


def redraw_factor(endpoints: Iterable[Endpoint]) -> float:
    """Return what the intervals between redraws are multiplied by while ``endpoints`` are measured."""
    shares = any(endpoint.client.local and endpoint.facts.device == "cpu" for endpoint in endpoints)
    return SHARED_CORES_FACTOR if shares else 1.0


async def follow(run: Run, skip: Callable[[], bool]) -> AsyncIterator[Frame]:
    """Yield frames while a run goes on, the plain panel replayed in step with the other, until both have ended.

    Args:
        run: a started run.
        skip: whether the visitor wants the end at once.
    """
    rarer = redraw_factor(run.endpoints.values())
    redraw, replot = Throttle(rarer * UPDATE_INTERVAL_S), Throttle(rarer * PLOT_INTERVAL_S)
    facts = {side: endpoint.facts for side, endpoint in run.endpoints.items()}
    while True:
        now = time.monotonic()
        finished = run.finished  # before the tracks are looked at, so that the last frame has everything
        behind = _behind(run, now)
        if finished and (behind is None or skip()):
            break
        if redraw.due(now):
            positions = {PLAIN_SIDE: behind, FAST_SIDE: None}
            scene = Scene(run.settings, facts, run.tracks, run.verdict, positions, _notes(run, behind))
            yield draw(scene, replot.due(now))
        await asyncio.sleep(TICK_S)
    yield final(run.recording())


def _behind(run: Run, now: float) -> float | None:
    """Return where the replay of the plain panel is, or ``None`` if it shows everything."""
    started = run.started_s.get(FAST_SIDE)
    if run.settings.timing != TURNS or started is None:
        return None
    position = now - started
    return position if position < run.tracks[PLAIN_SIDE].end_s() else None


def _notes(run: Run, behind: float | None) -> dict[str, str]:
    plain, fast = run.tracks[PLAIN_SIDE], run.tracks[FAST_SIDE]
    if run.settings.timing != TURNS:
        return {}
    notes = {}
    if behind is not None:
        notes[PLAIN_SIDE] = "replayed at the pace measured before"
    elif not plain.steps and not plain.ended:
        notes[PLAIN_SIDE] = run.phase
    elif plain.status == RUNNING:
        notes[PLAIN_SIDE] = "measured alone"
    if not fast.steps and not fast.ended:
        notes[FAST_SIDE] = "next, when the server is free"
    elif fast.status == RUNNING:
        notes[FAST_SIDE] = "measured alone"
    return notes


async def replay(recording: Recording, speed: float, skip: Callable[[], bool]) -> AsyncIterator[Frame]:
    """Yield frames of a recorded run, both panels from their sending on, ``speed`` times as fast as it was."""
    redraw, replot = Throttle(UPDATE_INTERVAL_S), Throttle(PLOT_INTERVAL_S)
    clock = ReplayClock(time.monotonic(), speed)
    end = max(track.end_s() for track in recording.tracks.values())
    note = f"replayed at {speed:g} times the measured pace" if speed != 1 else "replayed at the measured pace"
    while not skip():
        now = time.monotonic()
        position = clock.position(now)
        if position >= end:
            break
        if redraw.due(now):
            positions = dict.fromkeys(SIDES, position)
            notes = {side: note for side in SIDES if position < recording.tracks[side].end_s()}
            scene = Scene(recording.settings, recording.servers, recording.tracks, Verdict(OPEN), positions, notes)
            yield draw(scene, replot.due(now))
        await asyncio.sleep(TICK_S)
    yield final(recording)


def final(recording: Recording) -> Frame:
    """Draw a run's end."""
    positions: dict[str, float | None] = dict.fromkeys(SIDES)
    scene = Scene(recording.settings, recording.servers, recording.tracks, recording.verdict, positions, {})
    return draw(scene, True)
