"""Mode ``auto``: the fastest of parallel, sequential and plain decoding, by measurement while serving.

A speculative step takes longer than a plain one and commits more tokens; it pays while

    tokens per step x plain step time > speculative step time.

Both sides depend on the machine, the batch and the text, so both are measured (FlexDraft section 4 fixes a batch size
instead). Every mode gives the same text, so trying one costs time only, and little of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from sglang_ext.core.costs import AcceptLengths, StepCosts, bucket
from sglang_ext.core.schedule import Mode, ModePolicy

#: Steps a mode is tried for; the first one after a switch is not measured.
TRIAL_STEPS = 4
#: Steps of a batch size before its second speculative mode is first timed.
FIRST_TRIAL_AFTER = 8
#: Steps between later timings of the modes not in use; doubled for speculation each time it does not pay.
RETRY_AFTER = 256
LONGEST_RETRY = 2048
#: A switch back to speculation must promise this much, so that noise does not flip the mode.
MARGIN = 1.03


class Pace:
    """Chooses the mode of every step of a server; one object per worker.

    Args:
        thresholds: the user's limits. ``plain_min_batch`` and ``parallel_max_batch`` are kept; within them the fastest
            mode is used. A mode by name leaves nothing to choose.
        can_join: whether the drafter has a parallel mode.
        adaptive: False decides by the thresholds alone.
    """

    def __init__(self, thresholds: ModePolicy, can_join: bool, adaptive: bool) -> None:
        self._thresholds = thresholds
        self._can_join = can_join
        self._adaptive = adaptive and thresholds.mode == "auto"
        self.costs = StepCosts()
        self.accepts = AcceptLengths()
        #: The open step: its mode (None: not worth measuring), its batch size, when it began.
        self._open: tuple[Mode | None, int, float] | None = None
        self._mode: Mode | None = None
        self._switched = False
        self._trial_left = 0
        self._idle: dict[tuple[Mode, int], int] = {}
        self._retry: dict[int, int] = {}

    def choose(self, requests: Sequence[Hashable], batch_size: int) -> Mode:
        """Return the mode of the next step for ``requests``, those of the batch that force none themselves."""
        static = self._static(batch_size)
        if not self._adaptive or static is Mode.PLAIN:
            return static
        mode = self._mode
        arms = self._arms(batch_size)
        if self._trial_left and mode in arms:
            self._trial_left -= 1
        else:
            mode = self._trial(batch_size, static) or self._fastest(requests, batch_size)
        assert mode is not None
        self._switched = mode is not self._mode
        self._mode = mode
        for arm in arms:
            key = (arm, bucket(batch_size))
            self._idle[key] = 0 if arm is mode else self._idle.get(key, 0) + 1
        return mode

    def drafts_after_prefill(self) -> bool:
        """Whether a prompt that was just read should be drafted for at once."""
        if not self._adaptive:
            return self._static(1) is not Mode.PLAIN
        return self._mode is not Mode.PLAIN

    def started(self, now_ms: float, modes: Sequence[Mode]) -> None:
        """Note the start of a step, the modes of its requests; it ends the step before, which is then measured."""
        if self._open is not None and self._open[0] is not None:
            self.costs.add(self._open[0], self._open[1], now_ms - self._open[2])
        measurable = len(set(modes)) == 1 and not self._switched
        self._open = (modes[0] if measurable else None, len(modes), now_ms)

    def interrupted(self) -> None:
        """Forget the open step: a prefill came in between."""
        self._open = None

    def committed(self, request: Hashable, tokens: int) -> None:
        """Note what a step that verified drafts committed for one request, bonus included."""
        self.accepts.add(request, tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return what was measured: ``{"adaptive", "step_ms", "accept_length"}``, JSON types only."""
        return {
            "adaptive": self._adaptive,
            "step_ms": self.costs.to_dict(),
            "accept_length": round(self.accepts.mean, 3),
        }

    def _static(self, size: int) -> Mode:
        mode = self._thresholds.choose(size)
        return Mode.SEQUENTIAL if mode is Mode.PARALLEL and not self._can_join else mode

    def _arms(self, size: int) -> list[Mode]:
        parallel = self._can_join and size <= self._thresholds.parallel_max_batch
        return [*([Mode.PARALLEL] if parallel else []), Mode.SEQUENTIAL, Mode.PLAIN]

    def _trial(self, size: int, static: Mode) -> Mode | None:
        """Return a mode whose time is unknown or old, or None."""
        mode = None
        # Plain decoding goes first: timing it loses nothing, and speculation is then judged after a few steps.
        unknown = [arm for arm in (Mode.PLAIN, static) if not self.costs.count(arm, size)]
        if unknown:
            mode = unknown[0]
        else:
            for arm in self._arms(size):
                idle = self._idle.get((arm, bucket(size)), 0)
                wait = RETRY_AFTER if self.costs.count(arm, size) else FIRST_TRIAL_AFTER
                if self._mode is Mode.PLAIN:
                    wait = self._retry.get(bucket(size), RETRY_AFTER) if arm is static else 2 * LONGEST_RETRY
                if arm is not self._mode and idle >= wait:
                    mode = arm
                    break
        if mode is not None:
            self._trial_left = TRIAL_STEPS - 1
            if self._mode is Mode.PLAIN and not unknown:
                self._retry[bucket(size)] = min(2 * self._retry.get(bucket(size), RETRY_AFTER), LONGEST_RETRY)
        return mode

    def _fastest(self, requests: Sequence[Hashable], size: int) -> Mode:
        known = [arm for arm in self._arms(size) if arm is not Mode.PLAIN and self.costs.count(arm, size)]
        best = min(known, key=lambda arm: self.costs.ms(arm, size))
        gain = self.accepts.expected(requests) * self.costs.ms(Mode.PLAIN, size) / self.costs.ms(best, size)
        if gain < (MARGIN if self._mode is Mode.PLAIN else 1.0):
            return Mode.PLAIN
        self._retry.pop(bucket(size), None)
        return best
