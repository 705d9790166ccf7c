"""What steps cost and what they bring, measured while serving: the numbers behind mode ``auto`` (FlexDraft section 4).

Times are milliseconds between the starts of two consecutive decode steps, so they hold everything a step costs, the
host's own part included; a step before a prefill ends where the worker left it, without that part.

A machine's speed drifts: other work, heat, a clock that changes. Modes are therefore compared only by times taken
close together, and what is remembered is their ratio, which outlives the drift.
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
#: Measured steps after which a time no longer tells how fast the machine is now.
FRESH_STEPS = 32
#: A pause after which the same holds.
FRESH_MS = 10_000.0
#: Steps that a median must rest on before modes are compared by it.
ENOUGH_STEPS = 3
#: Comparisons a mode's cost is the median of.
COMPARISONS = 3


def bucket(batch_size: int) -> int:
    """Return the power of two at or above ``batch_size``: batches of one bucket share their measured times."""
    return 1 << max(batch_size - 1, 0).bit_length()


class StepCosts:
    """Times of the latest steps by mode and batch bucket, and what a mode's step costs in plain steps."""

    def __init__(self) -> None:
        self._clock = 0
        self._now = 0.0
        #: Latest steps: (number of the measured step, ms).
        self._recent: dict[tuple[Mode, int], deque[tuple[int, float]]] = {}
        #: Number of the measured step at which a mode came back after its earlier times had gone stale.
        self._visits: dict[tuple[Mode, int], int] = {}
        #: Latest comparisons: (the visits compared, cost in plain steps).
        self._compared: dict[tuple[Mode, int], deque[tuple[tuple[Mode, int, int], float]]] = {}

    def add(self, mode: Mode, batch_size: int, ms: float, now_ms: float = 0.0) -> None:
        """Record one step that ended at ``now_ms`` of any clock."""
        size = bucket(batch_size)
        self._clock += 1
        if now_ms - self._now > FRESH_MS:
            self._clock += FRESH_STEPS  # what was timed before the pause is stale
        self._now = now_ms
        times = self._recent.setdefault((mode, size), deque(maxlen=_WINDOW))
        if not times or not self._is_fresh(times[-1]):
            self._visits[mode, size] = self._clock
        while times and not self._is_fresh(times[0]):
            times.popleft()
        times.append((self._clock, ms))
        self._compare(mode, size)

    def fresh(self, mode: Mode, batch_size: int) -> bool:
        """Return whether the mode's time in this bucket is recent and rests on enough steps to compare by."""
        times = self._recent.get((mode, bucket(batch_size)))
        return times is not None and len(times) >= ENOUGH_STEPS and self._is_fresh(times[-1])

    def known(self, mode: Mode, batch_size: int) -> bool:
        """Return whether the mode was compared with plain decoding in this bucket."""
        return mode is Mode.PLAIN or (mode, bucket(batch_size)) in self._compared

    def relative(self, mode: Mode, batch_size: int) -> float | None:
        """Return what a step of ``mode`` costs in plain steps, by times taken close together.

        A bucket in which it was never compared borrows from the next smaller one, else from the next larger one; a
        mode never compared at all borrows from another one that drafts. None if nothing was compared yet.
        """
        if mode is Mode.PLAIN:
            return 1.0
        size = bucket(batch_size)
        known = [key for key in self._compared if key[0] is mode] or list(self._compared)
        if not known:
            return None
        smaller = [key for key in known if key[1] <= size]
        return self._cost(*(max(smaller, key=_size) if smaller else min(known, key=_size)))

    def ms(self, mode: Mode, batch_size: int) -> float:
        """Return the median of the mode's latest steps in milliseconds.

        Raises:
            KeyError: if no such step was measured.
        """
        return median(ms for _, ms in self._recent[mode, bucket(batch_size)])

    def to_dict(self) -> list[dict[str, object]]:
        """Return ``[{"mode", "batch", "ms", "steps", "plain_steps"}]``, JSON types only.

        ``plain_steps`` is the mode's cost in plain steps of this batch bucket, None where they were not compared.
        """
        found: list[dict[str, object]] = []
        for (mode, size), times in sorted(self._recent.items()):
            cost = self.relative(mode, size) if self.known(mode, size) else None
            ms = round(self.ms(mode, size), 3)
            plain_steps = None if cost is None else round(cost, 3)
            found.append({"mode": mode.value, "batch": size, "ms": ms, "steps": len(times), "plain_steps": plain_steps})
        return found

    def _is_fresh(self, sample: tuple[int, float]) -> bool:
        return self._clock - sample[0] <= FRESH_STEPS

    def _cost(self, mode: Mode, size: int) -> float:
        return median(cost for _, cost in self._compared[mode, size])

    def _compare(self, mode: Mode, size: int) -> None:
        """Compare ``mode`` with the others that were timed lately."""
        if not self.fresh(mode, size):
            return
        others = [other for other in Mode if other is not mode and self.fresh(other, size)]
        if mode is Mode.PLAIN:
            for other in others:
                self._note(other, mode, size, 1.0)
        elif Mode.PLAIN in others:
            self._note(mode, Mode.PLAIN, size, 1.0)
        else:
            # Only the newcomer is judged by the other: what it was judged by must not come back as news.
            for other in others:
                if self.known(other, size) and self._visits[mode, size] > self._visits[other, size]:
                    self._note(mode, other, size, self._cost(other, size))

    def _note(self, mode: Mode, beside: Mode, size: int, cost: float) -> None:
        """Compare ``mode`` with a mode of known cost: refine the comparison of these visits, or begin another one."""
        visits = beside, self._visits[mode, size], self._visits[beside, size]
        noted = self._compared.setdefault((mode, size), deque(maxlen=COMPARISONS))
        if noted and noted[-1][0] == visits:
            noted.pop()
        noted.append((visits, cost * self.ms(mode, size) / self.ms(beside, size)))


def _size(key: tuple[Mode, int]) -> int:
    return key[1]


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

    def mostly_new(self, requests: Sequence[Hashable]) -> bool:
        """Return whether most of ``requests`` never verified a draft."""
        return 2 * sum(request not in self._requests for request in requests) > len(requests)

    def likely(self, requests: Sequence[Hashable]) -> float:
        """Return the mean over ``requests``, each one's own steps weighed against what the others showed."""
        prior, total = self.mean, 0.0
        for request in requests:
            steps, tokens = self._requests.get(request, (0, 0.0))
            total += (PRIOR_STEPS * prior + tokens) / (PRIOR_STEPS + steps)
        return total / len(requests)

    def expected(self, requests: Sequence[Hashable]) -> float:
        """Return the hopeful mean over ``requests``: the likely one plus a margin while little of them was seen."""
        seen = sum(self._requests.get(request, (0, 0.0))[0] for request in requests)
        return self.likely(requests) * (1.0 + OPTIMISM / math.sqrt(1.0 + seen))
