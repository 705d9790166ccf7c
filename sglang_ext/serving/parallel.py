"""The processes that share one target under ``--tp-size``, as the worker and the drafters see them.

Every process runs the same steps on the same requests, so whatever decides shapes or tokens must be the same in all of
them. Most of it follows from gathered numbers. The rest is decided by rank 0: what a step accepts (:func:`agree`) and
the modes that mode ``auto`` chooses by the clock (:class:`SharedPace`). In a single process nothing is sent.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_ext.core.accept import Accepted
from sglang_ext.core.pace import Pace
from sglang_ext.core.schedule import Mode, ModePolicy

_MODES = tuple(Mode)


class Ranks:
    """One of P processes that share a model; this class itself is the whole of P = 1.

    Every call but the properties is collective: all ranks make it, in the same order, with tensors of one shape.

    Attributes:
        rank: this process, 0 to P - 1.
        size: P.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def total(self, partial: Tensor) -> Tensor:
        """Return the sum of ``partial`` over the ranks; ``partial`` may be overwritten."""
        return partial

    def gather(self, own: Tensor) -> Tensor:
        """Return ``[P, ...]``: ``own`` of every rank."""
        return own[None]

    def from_first(self, own: Tensor) -> Tensor:
        """Return the tensor of rank 0; ``own`` may be overwritten."""
        return own

    def decide(self, choice: int) -> int:
        """Return the number of rank 0; travels on the host side, no device waits."""
        return choice


class HostRanks(Ranks):
    """The host's tensor-parallel group.

    Args:
        group: its ``GroupCoordinator``.
    """

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank_in_group, group.world_size)
        self._group = group

    def total(self, partial: Tensor) -> Tensor:
        """See :meth:`Ranks.total`."""
        total: Tensor = self._group.all_reduce(partial)
        return total

    def gather(self, own: Tensor) -> Tensor:
        """See :meth:`Ranks.gather`."""
        gathered: Tensor = self._group.all_gather(own[None].contiguous(), dim=0)
        return gathered

    def from_first(self, own: Tensor) -> Tensor:
        """See :meth:`Ranks.from_first`."""
        first: Tensor = self._group.broadcast(own.contiguous(), src=0)
        return first

    def decide(self, choice: int) -> int:
        """See :meth:`Ranks.decide`."""
        message = torch.tensor([choice])
        torch.distributed.broadcast(message, src=self._group.first_rank, group=self._group.cpu_group)
        return int(message)


def host_ranks() -> Ranks:
    """Return this process's place among those the host started for one target; call it once the target is loaded."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return Ranks() if group.world_size == 1 else HostRanks(group)


def agree(ranks: Ranks, accepted: Accepted) -> Accepted:
    """Return what rank 0 accepted: one small broadcast, none in a single process.

    Draws of sampled requests and the last bit of a sum may differ between devices; a token that did would part the
    ranks for good.
    """
    if ranks.size == 1:
        return accepted
    mine = torch.cat([accepted.lengths[:, None], accepted.bonus[:, None], accepted.tokens], dim=1)
    first = ranks.from_first(mine)
    return Accepted(lengths=first[:, 0].clone(), bonus=first[:, 1].clone(), tokens=first[:, 2:].clone())


class SharedPace(Pace):
    """A pace whose modes are those of rank 0, for they follow from times that each rank measures for itself.

    Args:
        ranks: the processes that must agree, more than one.
        thresholds, can_join, adaptive: see :class:`~sglang_ext.core.pace.Pace`.
    """

    def __init__(self, ranks: Ranks, thresholds: ModePolicy, can_join: bool, adaptive: bool) -> None:
        super().__init__(thresholds, can_join, adaptive)
        self._ranks = ranks

    def choose(self, requests: Sequence[Hashable], batch_size: int) -> Mode:
        """Return rank 0's mode of the next step; one message between hosts if modes are measured, else none."""
        if not self._adaptive:
            return super().choose(requests, batch_size)
        mode = super().choose(requests, batch_size) if self._ranks.rank == 0 else Mode.PLAIN
        # Whether a prompt is drafted for once it is read follows from the mode chosen last.
        self._mode = _MODES[self._ranks.decide(_MODES.index(mode))]
        return self._mode


def make_pace(ranks: Ranks, thresholds: ModePolicy, can_join: bool, adaptive: bool) -> Pace:
    """Return the pace of a worker that is one of ``ranks``."""
    if ranks.size == 1:
        return Pace(thresholds, can_join, adaptive)
    return SharedPace(ranks, thresholds, can_join, adaptive)
