"""What steps cost and what they bring, measured while serving: the numbers behind mode ``auto`` (FlexDraft section 4).

Times are milliseconds between the starts of two consecutive decode steps with no prefill between them, so they hold
everything a step costs, the host's own part included.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from statistics import median

from sglang_ext.core.schedule import Mode

#: A request's own history outweighs what other requests showed after this many of its steps.
PRIOR_STEPS = 4
#: How much is expected of a batch beyond what is known, shrinking with the root of its requests' measured steps.
OPTIMISM = 0.3
#: Requests remembered; the oldest are forgotten first.
REMEMBERED = 4096
_WINDOW = 15
_GLOBAL_DECAY = 0.98


def bucket(batch_size: int) -> int:
    """Return the power of two at or above ``batch_size``: batches of one bucket share their measured times."""
    return 1 << max(batch_size - 1, 0).bit_length()


class StepCosts:
    """Median time of the latest steps, by mode and batch bucket."""

    def __init__(self) -> None:
        self._recent: dict[tuple[Mode, int], deque[float]] = {}

    def add(self, mode: Mode, batch_size: int, ms: float) -> None:
        """Record one step."""
        self._recent.setdefault((mode, bucket(batch_size)), deque(maxlen=_WINDOW)).append(ms)

    def count(self, mode: Mode, batch_size: int) -> int:
        """Return how many steps the median rests on."""
        return len(self._recent.get((mode, bucket(batch_size)), ()))

    def ms(self, mode: Mode, batch_size: int) -> float:
        """Return the median in milliseconds.

        Raises:
            KeyError: if no such step was measured.
        """
        return median(self._recent[mode, bucket(batch_size)])

    def to_dict(self) -> list[dict[str, object]]:
        """Return ``[{"mode", "batch", "ms", "steps"}]``, JSON types only."""
        return [
            {"mode": mode.value, "batch": size, "ms": round(median(times), 3), "steps": len(times)}
            for (mode, size), times in sorted(self._recent.items())
        ]


class AcceptLengths:
    """Expected tokens of a speculative step, bonus included, by request."""

    def __init__(self) -> None:
        self._requests: dict[Hashable, tuple[int, float]] = {}
        self._steps = 0.0
        self._tokens = 0.0

    @property
    def mean(self) -> float:
        """Mean over the latest steps of all requests; 2.0 (one draft accepted) before any was seen."""
        return (self._tokens + 2.0) / (self._steps + 1.0)

    def add(self, request: Hashable, tokens: int) -> None:
        """Record the tokens one speculative step of ``request`` committed."""
        steps, total = self._requests.pop(request, (0, 0.0))
        self._requests[request] = (steps + 1, total + tokens)
        if len(self._requests) > REMEMBERED:
            del self._requests[next(iter(self._requests))]
        self._steps = self._steps * _GLOBAL_DECAY + 1
        self._tokens = self._tokens * _GLOBAL_DECAY + tokens

    def expected(self, requests: Sequence[Hashable]) -> float:
        """Return the hopeful mean over ``requests``: what is known, plus a margin while little of them was seen."""
        prior, total, seen = self.mean, 0.0, 0
        for request in requests:
            steps, tokens = self._requests.get(request, (0, 0.0))
            total += (PRIOR_STEPS * prior + tokens) / (PRIOR_STEPS + steps)
            seen += steps
        return total / len(requests) * (1.0 + OPTIMISM / math.sqrt(1.0 + seen))
