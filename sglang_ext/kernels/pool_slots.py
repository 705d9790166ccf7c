"""Pool slots of packed rows, and where pooled and own rows go in packed keys.

Shape legend: B requests, M pooled rows, N own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from sglang_ext.kernels.language import blocks, jit, launch, tl

ROWS = 1024
"""Rows of a request that one program of the kernel lays out."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of a batch, request by request: how many the host knows, where they start the device does too.

    Attributes:
        pooled: rows per request that are in the pool.
        own: rows per request behind them that are not.
        ptr: ``[2, B+1]`` int32 on the device, first pooled and first own row of each request.
    """

    pooled: tuple[int, ...]
    own: tuple[int, ...]
    ptr: Tensor

    @classmethod
    def of(cls, pooled: Sequence[int], own: Sequence[int] | None, device: torch.device | str) -> PackedRows:
        """Send the pointers on their way; ``own`` is None where all rows are pooled.

        Raises:
            ValueError: there is not one number of each per request.
        """
        own = (0,) * len(pooled) if own is None else own
        if len(pooled) != len(own):
            raise ValueError(f"{len(pooled)} pooled and {len(own)} own row counts were given; one of each per request")
        ptr = torch.tensor([[0, *accumulate(pooled)], [0, *accumulate(own)]], dtype=torch.int32)
        return cls(tuple(pooled), tuple(own), ptr.to(device, non_blocking=True))


@dataclass(frozen=True, eq=False)
class Places:
    """Where the rows of packed keys come from and go.

    Attributes:
        slots: ``[M]`` int64 pool slots of the pooled rows.
        pooled_at, own_at: ``[M]``, ``[N]`` int64 places in the packed keys, which are each request's pooled rows, then
            its own.
    """

    slots: Tensor
    pooled_at: Tensor
    own_at: Tensor


def _numbers(ptr: Tensor, total: int) -> tuple[Tensor, Tensor]:
    row = torch.arange(total, device=ptr.device)
    request = torch.searchsorted(ptr[1:], row, right=True)
    return request, row - ptr[request]


def row_numbers(lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return request and column ``[sum(lengths)]`` int64 of packed rows, computed on the device."""
    return _numbers(PackedRows.of(lengths, None, device).ptr[0], sum(lengths))


def slots_of(table: Tensor, requests: Tensor, first: Tensor | None, lengths: Sequence[int]) -> Tensor:
    """Return ``[sum(lengths)]`` int32 pool slots of each request's tokens from position ``first`` on.

    Args:
        table: the host's slot table ``[requests, positions]``.
        requests: ``[B]`` rows of it.
        first: ``[B]`` first position, None for 0.
        lengths: tokens per request.
    """
    return packed_slots(table, requests, first, PackedRows.of(lengths, None, table.device))


def packed_slots(table: Tensor, requests: Tensor, first: Tensor | None, rows: PackedRows) -> Tensor:
    """Return ``[M]`` int32: :func:`slots_of` for pointers that are on the device already."""
    request, column = _numbers(rows.ptr[0], sum(rows.pooled))
    if first is not None:
        # Rows that are only carried along may lie past the table; what they read is seen by no real row.
        column = (column + first[request]).clamp_max(table.shape[1] - 1)
    return table[requests[request], column].to(torch.int32)


def inline_places(table: Tensor, requests: Tensor, first: Tensor | None, rows: PackedRows) -> Places:
    """Lay out packed keys: ``rows.pooled`` rows from position ``first`` on and ``rows.own`` own ones, per request."""
    pooled, own = rows.ptr
    places = []
    for base, ptr, total in ((own, pooled, sum(rows.pooled)), (pooled[1:], own, sum(rows.own))):
        request, column = _numbers(ptr, total)
        # A request's keys start behind the pooled and own rows of those before it.
        places.append(base[request] + ptr[request] + column)
    return Places(packed_slots(table, requests, first, rows).long(), *places)


@jit
def _lay_out(
    table, requests, first, ptr, slots, pooled_at, own_at, batch, stride, positions,
    SHIFTED: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = tl.program_id(1)
    start = tl.load(ptr + request)
    pooled = tl.load(ptr + request + 1) - start
    column = at.to(tl.int64)
    if SHIFTED:
        column = tl.minimum(column + tl.load(first + request), positions - 1)
    inside = at < pooled
    line = tl.load(requests + request).to(tl.int64) * stride
    tl.store(slots + start + at, tl.load(table + line + column, mask=inside, other=0), mask=inside)
    if PLACES:
        own_start = tl.load(ptr + batch + 1 + request)
        own = tl.load(ptr + batch + 2 + request) - own_start
        key = start + own_start + at
        tl.store(pooled_at + start + at, key, mask=inside)
        tl.store(own_at + own_start + at, key + pooled, mask=at < own)


def packed_slots_fused(table: Tensor, requests: Tensor, first: Tensor | None, rows: PackedRows) -> Tensor:
    """:func:`packed_slots` in one launch."""
    slots = torch.empty(sum(rows.pooled), dtype=torch.int32, device=table.device)
    grid = (blocks(max(rows.pooled, default=0), ROWS), len(rows.pooled))
    launch(
        _lay_out, grid, table, requests, first, rows.ptr, slots, None, None, len(rows.pooled), table.stride(0),
        table.shape[1], SHIFTED=first is not None, PLACES=False, ROWS=ROWS,
    )  # fmt: skip
    return slots


def inline_places_fused(table: Tensor, requests: Tensor, first: Tensor | None, rows: PackedRows) -> Places:
    """:func:`inline_places` in one launch."""
    slots, pooled_at = (torch.empty(sum(rows.pooled), dtype=torch.int64, device=table.device) for _ in range(2))
    own_at = torch.empty(sum(rows.own), dtype=torch.int64, device=table.device)
    grid = (blocks(max((*rows.pooled, *rows.own), default=0), ROWS), len(rows.pooled))
    launch(
        _lay_out, grid, table, requests, first, rows.ptr, slots, pooled_at, own_at, len(rows.pooled), table.stride(0),
        table.shape[1], SHIFTED=first is not None, PLACES=True, ROWS=ROWS,
    )  # fmt: skip
    return Places(slots, pooled_at, own_at)
