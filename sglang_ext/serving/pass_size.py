"""The size of a captured pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PassSize:
    """Rows of a captured pass.

    Attributes:
        batch: B, padded requests included.
        width: W clean rows per request.
        groups: G mask groups per request.
    """

    batch: int
    width: int
    groups: int
