"""When what is shown: which steps of a recorded answer are visible at a time, and how often a page is redrawn."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from demo.steps import Step

UPDATE_INTERVAL_S = 0.0625
"""Shortest time between two redraws: 16 a second."""
PLOT_INTERVAL_S = 0.5
SHARED_CORES_FACTOR = 8.0
"""How much rarer both are while a model runs on the cores that draw: drawing more often slows what is measured."""


def visible(steps: Sequence[Step], at_s: float) -> Sequence[Step]:
    """Return the steps that had arrived ``at_s`` seconds after sending."""
    return steps[: bisect_right(steps, at_s, key=lambda step: step.at_s)]


class ReplayClock:
    """Seconds into a replay that runs ``speed`` times as fast as the run did.

    Args:
        started_s: the wall clock when the replay began.
        speed: 1 for the recorded pace.
    """

    def __init__(self, started_s: float, speed: float = 1.0) -> None:
        self._started_s = started_s
        self._speed = speed

    def position(self, now_s: float) -> float:
        """Return the place in the recording, in seconds."""
        return max(0.0, now_s - self._started_s) * self._speed


class Throttle:
    """Lets something happen at most once per interval."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last_s: float | None = None

    def due(self, now_s: float) -> bool:
        """Return whether it may happen now, and if so count from now."""
        if self._last_s is not None and now_s - self._last_s < self._interval_s:
            return False
        self._last_s = now_s
        return True
