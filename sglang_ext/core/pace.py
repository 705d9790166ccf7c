"""Mode ``auto``: the fastest of parallel, sequential and plain decoding, by measurement while serving.

A speculative step takes longer than a plain one and commits more tokens; it pays while

    tokens per step > speculative step time / plain step time.

Both sides depend on the machine, the batch and the text, so both are measured (FlexDraft section 4 fixes a batch size
instead). Every mode gives the same text, so trying one costs time only, and how often it is tried follows from that
time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from sglang_ext.core.costs import AcceptLengths, StepCosts, bucket
from sglang_ext.core.schedule import Mode, ModePolicy

#: Steps a mode is tried for; the first one after a switch is not measured.
TRIAL_STEPS = 5
#: Steps of a batch size before a mode never timed in it, plain decoding included, is tried.
FIRST_TRIAL_AFTER = 8
#: Share of the time that may go into trying modes not in use; larger where the batch holds mostly new requests.
TRIAL_SHARE, NEWCOMER_SHARE = 0.005, 0.01
#: What leaving a mode and coming back costs beside the steps in between, in plain steps: drafts made and not verified.
SWITCH_COST = 1.0
#: Bounds of the steps between two timings of a mode not in use.
SHORTEST_RETRY, LONGEST_RETRY = 64, 2048
#: Steps between two timings of the slower speculative mode.
OTHER_RETRY = 256
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
        #: Steps of a batch bucket since a mode was last used in it.
        self._idle: dict[tuple[Mode, int], int] = {}

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
            mode = self._choose(requests, batch_size, static)
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

    def _choose(self, requests: Sequence[Hashable], size: int, static: Mode) -> Mode:
        """Return a mode to be timed, or the fastest one."""
        drafting = [arm for arm in self._arms(size) if arm is not Mode.PLAIN]
        cost = {arm: self.costs.relative(arm, size) for arm in drafting}
        known = {arm: plain_steps for arm, plain_steps in cost.items() if plain_steps is not None}
        if not known:
            # Plain decoding goes first: timing it loses nothing, and speculation is then judged after a few steps.
            return self._try(static if self.costs.fresh(Mode.PLAIN, size) else Mode.PLAIN)
        best = min(known, key=lambda arm: known[arm])
        gain = self.accepts.expected(requests) / known[best]
        if gain < (MARGIN if self._mode is Mode.PLAIN else 1.0):
            due = self._mode is Mode.PLAIN and self._waited(best, size, self._retry_after(requests, known[best]))
            untried = [arm for arm in drafting if not self.costs.known(arm, size)]
            return self._try((untried or [best])[0]) if due else Mode.PLAIN
        wait = _steps_between((SWITCH_COST + TRIAL_STEPS * (gain - 1.0)) / gain, TRIAL_SHARE)
        if self._waited(Mode.PLAIN, size, wait if self.costs.known(best, size) else FIRST_TRIAL_AFTER):
            return self._try(Mode.PLAIN)
        for arm in drafting:
            if self._waited(arm, size, OTHER_RETRY if self.costs.known(arm, size) else FIRST_TRIAL_AFTER):
                return self._try(arm)
        return best

    def _retry_after(self, requests: Sequence[Hashable], cost: float) -> int:
        """Return after how many plain steps speculation is tried again: sooner on requests not drafted for yet."""
        trial = SWITCH_COST + TRIAL_STEPS * max(cost - self.accepts.likely(requests), 0.0)
        return _steps_between(trial, NEWCOMER_SHARE if self.accepts.mostly_new(requests) else TRIAL_SHARE)

    def _try(self, mode: Mode) -> Mode:
        self._trial_left = TRIAL_STEPS - 1
        return mode

    def _waited(self, arm: Mode, size: int, steps: int) -> bool:
        return arm is not self._mode and self._idle.get((arm, bucket(size)), 0) >= steps


def _steps_between(cost: float, share: float) -> int:
    """Return the steps between trials of ``cost`` plain steps each that together take ``share`` of the time."""
    return round(min(max(cost / share, SHORTEST_RETRY), LONGEST_RETRY))
