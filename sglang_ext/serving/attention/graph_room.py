"""What a FlashInfer call inside a captured graph keeps from capture to every replay, and how its tiles are chosen.

Shape legend: B requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PLAN_ARGUMENTS = 20
"""Arguments of a compiled module's planner; the last is the query rows every request has, 0 if they differ."""


@dataclass(frozen=True, eq=False)
class GraphRoom:
    """What a call inside a captured graph keeps from capture to every replay.

    Attributes:
        batch: B, padded requests included.
        rows: query rows of each request.
        plans: ``[bytes]`` uint8 on the device where plans are written. Calls that are planned right before each replay
            may share it with calls of other graphs, not with one of the same graph.
        slots: ``[most keys]`` int32, pool slots of a paged call; shared likewise.
        mask: ``[bytes]`` uint8, packed mask bits in mode CUSTOM; kernels read it anew in every replay.
    """

    batch: int
    rows: int
    plans: Tensor
    slots: Tensor | None = None
    mask: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the buffers live."""
        return self.plans.device

    def pointers(self, count: int) -> list[Tensor]:
        """Return fresh ``[B+1]`` int32 index pointers."""
        return [torch.zeros(self.batch + 1, dtype=torch.int32, device=self.device) for _ in range(count)]

    def mask_buffers(self) -> dict[str, Tensor]:
        """Return the wrapper's arguments for a custom mask; none without one."""
        if self.mask is None:
            return {}
        return {"custom_mask_buf": self.mask, "mask_indptr_buf": self.pointers(1)[0]}


class _UniformPlans:
    """A compiled module of the library whose plans choose tiles for ``rows`` query rows per request.

    The library's own planner does not pass the number on, and sizes tiles for the longest request a graph could hold.
    """

    def __init__(self, module: Any, rows: int) -> None:
        self._module = module
        self._rows = rows

    def plan(self, *args: Any) -> Any:
        """Plan as the module does, with ``uniform_q_len`` in its place, the last one."""
        if len(args) != PLAN_ARGUMENTS or args[-1] != 0:
            raise RuntimeError(
                f"FlashInfer plans with {len(args)} arguments, {PLAN_ARGUMENTS} were expected; this package expects "
                "FlashInfer 0.7: pip install flashinfer-python==0.7.2"
            )
        return self._module.plan(*args[:-1], self._rows)

    @property
    def paged_run(self) -> Any:
        """The module's call over pages."""
        return self._module.paged_run

    @property
    def ragged_run(self) -> Any:
        """The module's call over packed keys."""
        return self._module.ragged_run


def with_uniform_rows(wrapper: type, rows: int) -> type:
    """Return the wrapper class with plans for ``rows`` query rows per request."""

    def read(self: Any) -> Any:
        return self.__dict__["_cached_module"]

    def write(self: Any, module: Any) -> None:
        self.__dict__["_cached_module"] = None if module is None else _UniformPlans(module, rows)

    return type(f"Uniform{wrapper.__name__}", (wrapper,), {"_cached_module": property(read, write)})
