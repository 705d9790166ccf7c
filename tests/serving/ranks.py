"""Ranks of one server as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from sglang_ext.serving.parallel import Ranks

T = TypeVar("T")


class Meeting:
    """Where the ranks leave something and take what the others left."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls = 0
        self._barrier = threading.Barrier(size, timeout=60)
        self._left: list[Any] = [None] * size

    def exchange(self, rank: int, thing: Any) -> list[Any]:
        self._left[rank] = thing
        self._barrier.wait()
        found = list(self._left)
        self.calls += rank == 0
        self._barrier.wait()
        return found


class ThreadRanks(Ranks):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(rank, meeting.size)
        self._meeting = meeting

    def total(self, partial: Tensor) -> Tensor:
        return torch.stack(self._meeting.exchange(self.rank, partial)).sum(0)

    def gather(self, own: Tensor) -> Tensor:
        return torch.stack(self._meeting.exchange(self.rank, own))

    def from_first(self, own: Tensor) -> Tensor:
        return self._meeting.exchange(self.rank, own)[0]

    def decide(self, choice: int) -> int:
        return self._meeting.exchange(self.rank, choice)[0]


def on_every_rank(size: int, act: Callable[[Ranks], T]) -> list[T]:
    """Call ``act`` once per rank, all at the same time and without gradients; return what each returned."""
    meeting = Meeting(size)

    def run(rank: int) -> T:
        with torch.no_grad():
            return act(ThreadRanks(meeting, rank))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
