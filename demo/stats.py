"""Numbers of an answer, all computed from its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from demo.steps import ACCEPTED, BONUS, PLAIN, Step


@dataclass(frozen=True)
class Counts:
    """What happened to tokens and drafts.

    Attributes:
        tokens: committed tokens; always ``accepted + bonus + plain``.
        accepted, bonus, plain: committed tokens by kind.
        rejected: drafts verified and not accepted.
        proposed: drafts verified.
        passes: target passes that decoded (the prefill left out).
        accept_length: tokens per target pass, the prefill's token included, as SGLang counts it; ``None`` before the
            first decoding pass and from servers without telemetry.
    """

    tokens: int
    accepted: int
    bonus: int
    plain: int
    rejected: int
    proposed: int
    passes: int
    accept_length: float | None


def count(steps: Sequence[Step]) -> Counts:
    """Count tokens and drafts."""
    kinds = Counter(kind for step in steps for kind in step.kinds)
    records = [step.record for step in steps if step.record is not None]
    passes = sum(record.mode != "prefill" for record in records)
    tokens = sum(len(step.ids) for step in steps)
    return Counts(
        tokens=tokens,
        accepted=kinds[ACCEPTED],
        bonus=kinds[BONUS],
        plain=kinds[PLAIN],
        rejected=sum(len(step.rejected) for step in steps),
        proposed=sum(record.verify_length for record in records),
        passes=passes,
        accept_length=tokens / passes if passes and len(records) == len(steps) else None,
    )


@dataclass(frozen=True)
class Timing:
    """Where the time of an answer went, in seconds at the client.

    Attributes:
        first_s: from sending to the first token: queue, prefill and network.
        prefill_s: the prefill pass as the server timed it; ``None`` without a record.
        decode_s: from the first token to the last.
        decode_tokens: tokens after the first arrival.
    """

    first_s: float
    prefill_s: float | None
    decode_s: float
    decode_tokens: int

    @property
    def rate(self) -> float | None:
        """Tokens per second while decoding; ``None`` before two arrivals."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else None

    @property
    def queue_s(self) -> float | None:
        """What is left of ``first_s`` beside the prefill pass: queue, network, tokenizer."""
        return None if self.prefill_s is None else max(0.0, self.first_s - self.prefill_s)


def time(steps: Sequence[Step]) -> Timing | None:
    """Return the timing of an answer; ``None`` before its first token."""
    if not steps:
        return None
    first = steps[0]
    later = [step for step in steps if step.at_s > first.at_s]
    record = first.record
    return Timing(
        first_s=first.at_s,
        prefill_s=record.step_ms / 1000 if record is not None and record.mode == "prefill" else None,
        decode_s=steps[-1].at_s - first.at_s,
        decode_tokens=sum(len(step.ids) for step in later),
    )


def speedup(fast: Sequence[Step], plain: Sequence[Step]) -> float | None:
    """Return how many times faster ``fast`` decodes than ``plain``; ``None`` while one of them has no rate."""
    fast_time, plain_time = time(fast), time(plain)
    if fast_time is None or plain_time is None or not fast_time.rate or not plain_time.rate:
        return None
    return fast_time.rate / plain_time.rate


def accept_histogram(steps: Sequence[Step]) -> list[int]:
    """Return how many passes that verified drafts accepted 0, 1, 2, ... of them."""
    counts = Counter(step.record.accepted for step in steps if step.record is not None and step.record.verify_length)
    return [counts[value] for value in range(max(counts) + 1)] if counts else []


def slot_acceptance(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """Return ``(accepted, verified)`` for each slot of the block, first slot first."""
    slots: list[list[int]] = []
    for step in steps:
        record = step.record
        for slot in range(record.verify_length if record is not None else 0):
            if slot == len(slots):
                slots.append([0, 0])
            slots[slot][0] += record is not None and slot < record.accepted
            slots[slot][1] += 1
    return [(accepted, verified) for accepted, verified in slots]


def mode_spans(steps: Sequence[Step]) -> list[tuple[str, float, float]]:
    """Return the modes over time: ``(mode, from_s, to_s)``, neighbours of one mode joined."""
    spans: list[tuple[str, float, float]] = []
    before = 0.0
    for step in steps:
        if spans and spans[-1][0] == step.mode:
            spans[-1] = (step.mode, spans[-1][1], step.at_s)
        else:
            spans.append((step.mode, before, step.at_s))
        before = step.at_s
    return spans
