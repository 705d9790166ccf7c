"""Whether two answers are the same text: computed, and explained where they part."""

from __future__ import annotations

from dataclasses import dataclass

from demo.settings import Settings
from demo.tracks import DONE, Track

IDENTICAL, DIFFERENT, SAMPLED, OPEN = "identical", "different", "sampled", "open"


@dataclass(frozen=True)
class Verdict:
    """The comparison of a run's two answers.

    Attributes:
        status: ``identical``, ``different``, ``sampled`` (equality is not expected) or ``open`` (nothing to compare).
        common: tokens before the first difference.
        gap: how far apart the two tokens' log-probabilities are there in plain decoding; ``None`` if not asked.
    """

    status: str
    common: int = 0
    gap: float | None = None


def compare(settings: Settings, plain: Track, fast: Track) -> Verdict:
    """Compare token by token and character by character."""
    if plain.status != DONE or fast.status != DONE:
        return Verdict(OPEN)
    common = common_prefix(plain.ids, fast.ids)
    if plain.ids == fast.ids and plain.text == fast.text:
        return Verdict(IDENTICAL, common)
    return Verdict(DIFFERENT if settings.greedy else SAMPLED, common)


def common_prefix(one: list[int], other: list[int]) -> int:
    """Return how many leading tokens two answers share."""
    length = min(len(one), len(other))
    return next((index for index in range(length) if one[index] != other[index]), length)
