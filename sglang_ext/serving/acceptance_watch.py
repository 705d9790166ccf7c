"""One warning when a drafter never helps (law C5): a wrong drafter costs speed silently otherwise."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from sglang_ext.serving.plan import DRAFTER_FLAG, SpecPlan

logger = logging.getLogger(__name__)

PROPOSED_BEFORE_WARNING = 500
LOWEST_USEFUL_RATE = 0.01


class AcceptanceWatch:
    """Counts proposed and accepted drafts until it has seen enough to judge, then stays silent or warns once.

    Counts are kept on the device and read after 1, 2, 4, ... steps: a GPU is asked a dozen times at most.

    Args:
        plan: of the server.
        asleep: whether another process of the same server watches.
    """

    def __init__(self, plan: SpecPlan, *, asleep: bool = False) -> None:
        self._plan = plan
        self._totals: Tensor | None = None
        self._steps, self._next_look = 0, 1
        self._judged = asleep

    def add(self, proposed: Tensor, accepted: Tensor) -> None:
        """Count one step: drafts verified and accepted per request, both ``[B]``."""
        if self._judged:
            return
        step = torch.stack([proposed.sum(), accepted.sum()])
        self._totals = step if self._totals is None else self._totals + step
        self._steps += 1
        if self._steps < self._next_look:
            return
        self._next_look *= 2
        self._judge(*self._totals.tolist())

    def _judge(self, proposed: int, accepted: int) -> None:
        if proposed < PROPOSED_BEFORE_WARNING:
            return
        self._judged = True
        rate = accepted / proposed
        if rate < LOWEST_USEFUL_RATE:
            logger.warning(
                "Only %d of %d drafts were accepted (%.2f %%): the drafter %s does not fit this target. Likely causes: "
                "a drafter trained for another checkpoint or chat template, or an undertrained one; see "
                "`sglang-ext inspect` and %s.",
                accepted,
                proposed,
                100 * rate,
                self._plan.drafter_path or "(scripted)",
                DRAFTER_FLAG,
            )
