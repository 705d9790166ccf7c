"""Are two greedy outputs the same text, and if not, was it a tie?

Floating-point sums depend on how many rows a pass has, so two correct servers may break a near tie differently. Where
two outputs part, the plain server scores both tokens after the common prefix: a gap in log-probability below the
tolerance is a near tie; anything else is a difference that needs an explanation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_ext.bench.runner import Measurement
from sglang_ext.bench.stats import first_difference

Score = Callable[[Sequence[int], Sequence[int]], list[float]]
"""``score(input_ids, candidates)`` -> log-probabilities of the candidate next tokens."""


@dataclass
class TextCheck:
    """Counts over prompt pairs; ``gaps`` holds the log-probability gap of every pair that parted (None: no gap exists).

    A gap is None when one output simply ends where the other goes on.
    """

    pairs: int = 0
    equal: int = 0
    near_ties: int = 0
    gaps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def different(self) -> int:
        """Pairs that parted at no near tie."""
        return self.pairs - self.equal - self.near_ties

    def __str__(self) -> str:
        parts = [f"{self.equal}/{self.pairs}"]
        if self.near_ties:
            parts.append(f"{self.near_ties} near ties")
        if self.different:
            known = [item["gap"] for item in self.gaps if item["gap"] is not None]
            parts.append(f"{self.different} different" + (f" (gaps up to {max(known):.2f})" if known else ""))
        return ", ".join(parts)


def compare(
    first: Sequence[Measurement], second: Mapping[tuple[str, int, int], Measurement], score: Score, tie_gap: float
) -> TextCheck:
    """Compare each measurement with the one of the same round in ``second``, prompt by prompt."""
    check = TextCheck()
    for measurement in first:
        other = second[measurement.key]
        for prompt, mine, theirs in zip(
            measurement.block.prompts, measurement.completions, other.completions, strict=True
        ):
            check.pairs += 1
            at = first_difference(mine.output_ids, theirs.output_ids)
            if at is None:
                check.equal += 1
                continue
            gap = None
            if at < min(mine.tokens, theirs.tokens):
                candidates = [mine.output_ids[at], theirs.output_ids[at]]
                one, two = score([*prompt.input_ids, *mine.output_ids[:at]], candidates)
                gap = abs(one - two)
                check.near_ties += gap < tie_gap
            check.gaps.append({"prompt": prompt.name, "at": at, "gap": gap})
    return check
