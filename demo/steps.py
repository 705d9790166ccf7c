"""Steps of an answer: step records merged with the tokens they committed, each token with its kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ext.core.records import StepRecord

ACCEPTED, BONUS, PLAIN = "accepted", "bonus", "plain"
"""A draft the target agreed with; the target's own token of a pass that could verify drafts; one of a plain pass."""
NOT_SPECULATIVE = ("prefill", "plain")
UNKNOWN = "unknown"


class RecordsDisagree(ValueError):
    """Step records that do not spell the tokens they came with."""


@dataclass(frozen=True)
class Step:
    """One target pass of one request, as it arrived.

    Attributes:
        at_s: seconds from sending the request to the arrival of this step's tokens.
        ids: token ids committed (fewer than accepted + 1 where a limit or a stop cut the block).
        texts: their texts; the texts of all steps join to the answer.
        record: the server's record; ``None`` from a server without telemetry.
        draft_texts: text of each verified draft, special tokens spelled out.
    """

    at_s: float
    ids: tuple[int, ...]
    texts: tuple[str, ...]
    record: StepRecord | None = None
    draft_texts: tuple[str, ...] = ()

    @property
    def mode(self) -> str:
        """``prefill``, ``parallel``, ``sequential``, ``plain``, or ``unknown`` without a record."""
        return UNKNOWN if self.record is None else self.record.mode

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each committed token."""
        record = self.record
        if record is None or (record.verify_length == 0 and record.mode in NOT_SPECULATIVE):
            return (PLAIN,) * len(self.ids)
        return tuple(ACCEPTED if slot < record.accepted else BONUS for slot in range(len(self.ids)))

    @property
    def rejected(self) -> tuple[int, ...]:
        """Slots of the drafts that were verified and not accepted."""
        return () if self.record is None else tuple(range(self.record.accepted, self.record.verify_length))


def merge(
    at_s: float, ids: Sequence[int], texts: Sequence[str], elements: Sequence[dict[str, Any] | None]
) -> list[Step]:
    """Cut the new tokens of one chunk into steps.

    Args:
        at_s: arrival of the chunk.
        ids, texts: its new tokens.
        elements: the part of ``meta_info["speculative"]`` that belongs to them (a record at the first token of each
            step, ``None`` elsewhere); empty from a server without telemetry.

    Raises:
        RecordsDisagree: the records do not spell ``ids``.
    """
    if not ids:
        return []
    if not any(elements):
        return [Step(at_s, tuple(ids), tuple(texts))]
    if len(elements) != len(ids):
        raise RecordsDisagree(f"{len(elements)} record elements came with {len(ids)} tokens")
    if elements[0] is None:
        raise RecordsDisagree("a chunk starts in the middle of a step")
    starts = [index for index, element in enumerate(elements) if element is not None]
    steps = []
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        record = StepRecord.from_dict(elements[start] or {})
        step = Step(at_s, tuple(ids[start:end]), tuple(texts[start:end]), record)
        check(step)
        steps.append(step)
    return steps


def check(step: Step) -> None:
    """Hold a step's record to its tokens.

    Raises:
        RecordsDisagree: if accepted drafts and bonus token do not spell the committed ids.
    """
    record = step.record
    if record is None:
        return
    told = (*record.draft_ids[: record.accepted], record.bonus)
    if record.accepted > record.verify_length or len(record.draft_ids) != record.verify_length:
        raise RecordsDisagree(f"{record.accepted} of {record.verify_length} drafts accepted, ids {record.draft_ids}")
    if not step.ids or step.ids != told[: len(step.ids)]:
        raise RecordsDisagree(f"the record spells {told}, the answer has {step.ids}")
