"""Which way the next step is taken: parallel drafting, sequential drafting, or plain decoding.

FlexDraft section 4. :class:`ModePolicy` decides by batch size alone; ``core/pace.py`` refines its choice with what
steps cost and bring on the machine at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sglang_ext.core.refusal import Refusal, nearest


class Mode(str, Enum):
    """How one step of one request runs.

    PARALLEL verifies and drafts in one target pass (mask groups ride along); SEQUENTIAL verifies, then drafts in a
    second, short pass; PLAIN decodes one token without drafts.
    """

    PARALLEL = "parallel"
    SEQUENTIAL = "sequential"
    PLAIN = "plain"


AUTO = "auto"
MODE_NAMES = (AUTO, *(mode.value for mode in Mode))


def parse_mode(name: str, where: str = "mode") -> Mode | None:
    """Return the named mode, or None for ``"auto"``.

    Raises:
        Refusal: if the name is unknown; it names the nearest known one.
    """
    if name not in MODE_NAMES:
        raise Refusal(
            f"{where}={name!r} is not a mode{nearest(name, MODE_NAMES)}",
            f"allowed are {', '.join(MODE_NAMES)}",
            f"set {where} to one of them",
        )
    return None if name == AUTO else Mode(name)


@dataclass(frozen=True)
class ModePolicy:
    """Static batch thresholds (FlexDraft section 4: parallel pays while the step stays memory-bound).

    Attributes:
        mode: ``"auto"`` to decide by the thresholds below, or one mode for every step.
        parallel_max_batch: largest batch, in requests, that drafts in parallel; 0 never does.
        plain_min_batch: smallest batch that decodes plainly, looked at first; None never does.

    Raises:
        Refusal: on an unknown mode or a threshold out of range.
    """

    mode: str = AUTO
    parallel_max_batch: int = 2
    plain_min_batch: int | None = None

    def __post_init__(self) -> None:
        parse_mode(self.mode)
        if self.parallel_max_batch < 0:
            raise Refusal(
                f"parallel_max_batch={self.parallel_max_batch}",
                "a batch threshold is 0 (never parallel) or more",
                "set parallel_max_batch to 0 or a positive number of requests",
            )
        if self.plain_min_batch is not None and self.plain_min_batch < 1:
            raise Refusal(
                f"plain_min_batch={self.plain_min_batch}",
                "a batch holds 1 request or more",
                "set plain_min_batch to 1 or more, or leave it out to never decode plainly",
            )

    def choose(self, batch_size: int, forced: Mode | None = None) -> Mode:
        """Return the mode of the next step.

        Args:
            batch_size: requests in the step.
            forced: a mode asked for by the requests themselves; it wins over everything configured.
        """
        wanted = forced if forced is not None else parse_mode(self.mode)
        if wanted is not None:
            return wanted
        if self.plain_min_batch is not None and batch_size >= self.plain_min_batch:
            return Mode.PLAIN
        return Mode.PARALLEL if batch_size <= self.parallel_max_batch else Mode.SEQUENTIAL
