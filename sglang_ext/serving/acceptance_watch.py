"""One warning when a drafter never helps (law C5): a wrong drafter costs speed silently otherwise."""

from __future__ import annotations

import logging

from torch import Tensor

from sglang_ext.serving.plan import DRAFTER_FLAG, SpecPlan

logger = logging.getLogger(__name__)

PROPOSED_BEFORE_WARNING = 500
LOWEST_USEFUL_RATE = 0.01


class AcceptanceWatch:
    """Counts proposed and accepted drafts until it has seen enough to judge, then stays silent or warns once.

    Args:
        plan: of the server.
        asleep: whether another process of the same server watches.
    """

    def __init__(self, plan: SpecPlan, *, asleep: bool = False) -> None:
        self._plan = plan
        self._proposed = 0
        self._accepted = 0
        self._judged = asleep

    def add(self, proposed: int, accepted: Tensor) -> None:
        """Count one step; ``accepted [B]`` is read on the host only while judging."""
        if self._judged:
            return
        self._proposed += proposed
        self._accepted += int(accepted.sum())
        if self._proposed < PROPOSED_BEFORE_WARNING:
            return
        self._judged = True
        rate = self._accepted / self._proposed
        if rate < LOWEST_USEFUL_RATE:
            logger.warning(
                "Only %d of %d drafts were accepted (%.2f %%): the drafter %s does not fit this target. Likely causes: "
                "a drafter trained for another checkpoint or chat template, or an undertrained one; see "
                "`sglang-ext inspect` and %s.",
                self._accepted,
                self._proposed,
                100 * rate,
                self._plan.drafter_path or "(scripted)",
                DRAFTER_FLAG,
            )
