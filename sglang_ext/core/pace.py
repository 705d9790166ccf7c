"""Mode ``auto``: the fastest of parallel, sequential and plain decoding, by measurement while serving.

A speculative step takes longer than a plain one and commits more tokens; it pays while

    tokens per step > speculative step time / plain step time.

Both sides depend on the machine, the batch and the text, so both are measured (FlexDraft section 4 fixes a batch size
instead). Every mode gives the same text, so trying one costs time only, and as a rule how often it is tried follows
from that time.
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
#: Most steps between two timings of a mode not in use.
LONGEST_RETRY = 2048
#: Steps between two timings of the slower speculative mode.
OTHER_RETRY = 256
#: A switch back to speculation must promise this much, so that noise does not flip the mode.
MARGIN = 1.03
#: Plain steps that may be lost to drafting for requests of which too little is known, at first and as a share of all.
HOPE_START, HOPE_SHARE = 20.0, 0.02


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
        #: When the worker ended the open step, if it has.
        self._ended: float | None = None
        self._trial_left = 0
        #: Trials in a batch bucket that brought no comparison, one after the other.
        self._vain: dict[tuple[Mode, int], int] = {}
        #: Steps decided, and plain steps lost to hope.
        self._steps, self._hoped = 0, 0.0
        #: Steps of a batch bucket since a mode was last used in it.
        self._idle: dict[tuple[Mode, int], int] = {}

    def choose(self, requests: Sequence[Hashable], batch_size: int) -> Mode:
        """Return the mode of the next step for ``requests``, those of the batch that force none themselves."""
        static = self._static(batch_size)
        if not self._adaptive:
            return static
        if static is Mode.PLAIN:
            self._switched, self._mode, self._trial_left = self._mode is not static, static, 0
            return static
        mode = self._mode
        arms = self._arms(batch_size)
        self._steps += 1
        if self._trial_left and mode in arms:
            self._trial_left -= 1
        else:
            self._trial_left = 0
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
            self.costs.add(self._open[0], self._open[1], now_ms - self._open[2], now_ms)
        # A few requests decoded plainly beside drafted ones hardly change a pass: it counts as one that drafts.
        drafted = [mode for mode in modes if mode is not Mode.PLAIN]
        alike = not drafted or (len(set(drafted)) == 1 and 2 * len(drafted) >= len(modes))
        self._open = ((drafted or modes)[0] if alike and not self._switched else None, len(modes), now_ms)
        self._ended = None

    def ended(self, now_ms: float) -> None:
        """Note the end of the step on the worker's side; it counts where the next step does not follow at once."""
        self._ended = now_ms

    def interrupted(self) -> None:
        """End the open step where the worker left it: a prefill comes in between."""
        if self._open is not None and self._open[0] is not None and self._ended is not None:
            self.costs.add(self._open[0], self._open[1], self._ended - self._open[2], self._ended)
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
        known: dict[Mode, float] = {arm: plain_steps for arm, plain_steps in cost.items() if plain_steps is not None}
        if not known:
            # Plain decoding goes first: timing it loses nothing, and speculation is then judged after a few steps.
            timed = self.costs.fresh(Mode.PLAIN, size)
            return self._try(static if timed and self._due_untimed(static, size) else Mode.PLAIN)
        best = min(known, key=lambda arm: known[arm])
        gain = self._gain(requests, size, known[best])
        if gain < self._least_gain():
            return self._plain_or_trial(requests, size, known)
        return self._best_or_trial(size, known, best, gain)

    def _gain(self, requests: Sequence[Hashable], size: int, cost: float) -> float:
        """Return how many times faster than plain decoding the batch would be drafted for; hopeful within a budget."""
        share = len(requests) / size  # the others are decoded plainly whatever is chosen
        likely = (1.0 + (self.accepts.likely(requests) - 1.0) * share) / cost
        hope = (1.0 + (self.accepts.expected(requests) - 1.0) * share) / cost
        if likely >= 1.0 or hope < self._least_gain():
            return hope
        if self._hoped > HOPE_START + HOPE_SHARE * self._steps:
            return likely
        self._hoped += cost * (1.0 - likely) + (SWITCH_COST if self._mode is Mode.PLAIN else 0.0)
        return hope

    def _least_gain(self) -> float:
        return MARGIN if self._mode is Mode.PLAIN else 1.0

    def _plain_or_trial(self, requests: Sequence[Hashable], size: int, known: dict[Mode, float]) -> Mode:
        """Decode plainly, or try the mode that was not tried for longest: what was once too dear may have changed."""
        idle = {arm: self._idle.get((arm, bucket(size)), 0) for arm in known}
        untried = [arm for arm in known if not self.costs.known(arm, size)]
        arm = untried[0] if untried else max(idle, key=lambda arm: idle[arm])
        due = min(idle.values()) >= self._retry_after(requests, known[arm])
        return self._try(arm) if due and self._mode is Mode.PLAIN else Mode.PLAIN

    def _best_or_trial(self, size: int, known: dict[Mode, float], best: Mode, gain: float) -> Mode:
        """Draft in the best mode, or time another one beside it."""
        trial = (SWITCH_COST + TRIAL_STEPS * (gain - 1.0)) / gain
        if self._is_due(Mode.PLAIN, size, _steps_between(trial, TRIAL_SHARE), compared=self.costs.known(best, size)):
            return self._try(Mode.PLAIN)
        for arm, cost in known.items():
            wait = max(OTHER_RETRY, round(TRIAL_STEPS * (cost / known[best] - 1.0) / TRIAL_SHARE))
            if arm is not best and self._is_due(arm, size, wait, compared=self.costs.known(arm, size)):
                return self._try(arm)
        return best

    def _is_due(self, arm: Mode, size: int, wait: int, *, compared: bool) -> bool:
        return self._waited(arm, size, wait) if compared else self._due_untimed(arm, size)

    def _due_untimed(self, arm: Mode, size: int) -> bool:
        """Whether a mode never compared in this bucket is tried: ever more rarely while its trials cannot be timed."""
        key = arm, bucket(size)
        vain = self._vain.get(key, 0)
        if not self._waited(arm, size, min(FIRST_TRIAL_AFTER << vain, LONGEST_RETRY)):
            return False
        self._vain[key] = min(vain + 1, 16)
        return True

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
    return round(min(cost / share, LONGEST_RETRY))
