"""``StepRecord``: what one decoding step did for one request.

The demo, the metrics and the benchmarks read this one definition; ``serving/telemetry.py`` is the only writer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepRecord:
    """One target pass seen by one request.

    Attributes:
        mode: how the *next* drafts of this step were made: ``prefill``, ``parallel``, ``sequential`` or ``plain``.
        verify_length: drafts verified in this pass (0 for prefill and plain decoding).
        draft_ids: their token ids, in order.
        accepted: how many of them were accepted.
        bonus: the target's own token that follows the accepted ones.
        groups: mask groups that joined the target pass.
        confidence: drafter confidence of each verified draft, in (0, 1].
        step_ms: wall time of the worker's step, in milliseconds, shared by the whole batch; under overlapped scheduling
            the time between the starts of the step before and this one.
        batch_size: requests in the step.
    """

    mode: str
    verify_length: int
    draft_ids: tuple[int, ...]
    accepted: int
    bonus: int
    groups: int
    confidence: tuple[float, ...]
    step_ms: float
    batch_size: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        record = dataclasses.asdict(self)
        record["draft_ids"] = list(self.draft_ids)
        record["confidence"] = list(self.confidence)
        return record

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepRecord:
        """Read one element of ``meta_info["speculative"]``."""
        return cls(**{**data, "draft_ids": tuple(data["draft_ids"]), "confidence": tuple(data["confidence"])})


def read_records(elements: Iterable[dict[str, Any] | None]) -> list[StepRecord]:
    """Return the records of a ``meta_info["speculative"]`` list.

    The list has one element per completion token: the record at the first token of each step, ``None`` elsewhere.
    """
    return [StepRecord.from_dict(element) for element in elements if element is not None]
