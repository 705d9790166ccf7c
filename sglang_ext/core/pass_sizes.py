"""Sizes of a pass that the host picks without asking the device.

Row counts are picked before the device has said how many drafts are worth verifying; what it said of the last few steps
is known by then. Passes are captured for a few sizes, and a step takes the smallest that holds it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

REMEMBERED = 4
"""Steps looked back at. Too few rows cost accepted drafts, too many cost time; drafts come in runs."""


class RowForecast:
    """Forecasts the most drafts any request of a batch will want verified: the most of the last few steps.

    Args:
        block_size: K; before anything is known every draft has room.
    """

    def __init__(self, block_size: int) -> None:
        self._most = block_size - 1
        self._seen: deque[int] = deque(maxlen=REMEMBERED)

    def note(self, drafts: int) -> None:
        """Note how many drafts the request with the most of them wanted verified in a step."""
        self._seen.append(drafts)

    def rows(self) -> int:
        """Return for how many drafts to make room."""
        return max(self._seen, default=self._most)


def row_sizes(block_size: int) -> list[int]:
    """Return the row counts a pass may have: 1, powers of two, and K."""
    sizes = [1]
    while sizes[-1] * 2 < block_size:
        sizes.append(sizes[-1] * 2)
    return [*sizes, block_size]


def batch_sizes(largest: int) -> list[int]:
    """Return the numbers of requests that passes are captured for: 1, 2, 3, 4, 6, 8, 12, 16, 24, ... ``largest``.

    Replaying a pass for more requests than there are costs a little; capturing one for every number of requests costs
    memory and time at start.
    """
    sizes, step = {1, largest}, 2
    while step < largest:
        sizes |= {step, min(step * 3 // 2, largest)}
        step *= 2
    return sorted(sizes)


def smallest_at_least(sizes: Sequence[int], wanted: int) -> int:
    """Return the smallest of the ascending ``sizes`` that is at least ``wanted``.

    Raises:
        ValueError: none is.
    """
    for size in sizes:
        if size >= wanted:
            return size
    raise ValueError(f"{wanted} is above the largest size, {sizes[-1]}")
