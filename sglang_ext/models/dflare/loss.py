"""How DFlare's loss weighs the slots of a block over the course of training (DFlare section 4)."""

from __future__ import annotations


def gamma_at(progress: float, first: float, last: float) -> float:
    """The decay length gamma at schedule fraction ``progress`` in [0, 1]: linear from ``first`` to ``last``.

    Slot j weighs exp(-(j-1)/gamma): training begins with the slots near the bonus token and reaches out as they are
    learned. Equal ends give DFlash's fixed gamma.
    """
    return first + (last - first) * min(1.0, max(0.0, progress))
