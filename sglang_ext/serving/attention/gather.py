"""Gathering the keys and values of many requests from the paged pool into one padded buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

COLUMN_STEP = 64
"""Key columns are padded to a multiple of this: the bf16 product compiles a kernel (a millisecond) per new shape."""

Translate = Callable[[Tensor], Tensor]
"""Slots of the full pool to slots of the sliding-window pool."""


def padded_columns(length: int) -> int:
    """Return the number of key columns computed for ``length`` keys."""
    return max(COLUMN_STEP, -(-length // COLUMN_STEP) * COLUMN_STEP)


@dataclass
class Workspace:
    """Grow-only scratch buffers for gathered keys and values, reused by every layer and every step."""

    buffers: dict[tuple[str, int, torch.dtype], Tensor] = field(default_factory=dict)

    def take(self, role: str, index: int, rows: int, width: int, like: Tensor) -> Tensor:
        """Return a ``[rows, width]`` buffer of ``like``'s dtype; its contents are undefined."""
        key = (role, index, like.dtype)
        held = self.buffers.get(key)
        if held is None or held.numel() < rows * width:
            held = like.new_empty(rows * width)
            self.buffers[key] = held
        return held[: rows * width].view(rows, width)


class Gathered(NamedTuple):
    """Buffers of one gather.

    Attributes:
        kv_heads: Hk.
        key_rows, value_rows: ``[B*Hk*(S + extra), D]``.
        keys, values: the same memory as ``[B*Hk, S + extra, D]``.
    """

    kv_heads: int
    key_rows: Tensor
    value_rows: Tensor
    keys: Tensor
    values: Tensor


class Gather:
    """Keys and values of B requests, layer by layer.

    Args:
        index: names the scratch buffers; two gathers alive in one forward pass need different ones.
        slots: ``[B, S]`` pool slot of every key; padding columns repeat a slot of the same request, so that nothing of
            another request (a NaN, say) can enter a product.
        workspace: scratch buffers.
    """

    def __init__(self, index: int, slots: Tensor, workspace: Workspace) -> None:
        self.index = index
        self.slots = slots
        self.workspace = workspace
        self.extra = 0
        self._layer: int | None = None
        self._rows: dict[tuple[int, bool], Tensor] = {}
        self._gathered: Gathered | None = None

    @property
    def columns(self) -> int:
        """S, padded pool columns."""
        return self.slots.shape[1]

    def widen(self, columns: int) -> None:
        """Make the buffers ``columns`` wide, for keys that are written inline after the pool's."""
        extra = columns - self.columns
        if extra != self.extra:
            self.extra = extra
            self._rows.clear()
            self._gathered = None

    def read(self, layer: int, key_pool: Tensor, value_pool: Tensor, translate: Translate | None) -> Gathered:
        """Return keys and values of a layer.

        The same object is returned while shapes do not change, with the layer's contents in it. A second read of the
        same layer gathers nothing; the caller starts a new :class:`Gather` when the pool has changed.
        """
        held = self._gathered
        if held is None or held.kv_heads != key_pool.shape[1] or held.key_rows.dtype != key_pool.dtype:
            held = self._gathered = self._allocate(key_pool, value_pool)
            self._layer = None
        if self._layer != layer:
            rows = self._pool_rows(held.kv_heads, translate)
            torch.index_select(key_pool.view(-1, key_pool.shape[2]), 0, rows, out=held.key_rows)
            torch.index_select(value_pool.view(-1, value_pool.shape[2]), 0, rows, out=held.value_rows)
            self._layer = layer
        return held

    def _allocate(self, key_pool: Tensor, value_pool: Tensor) -> Gathered:
        batch, kv_heads = self.slots.shape[0], key_pool.shape[1]
        rows = batch * kv_heads * (self.columns + self.extra)
        keys = self.workspace.take("key", self.index, rows, key_pool.shape[2], key_pool)
        values = self.workspace.take("value", self.index, rows, value_pool.shape[2], value_pool)
        shape = (batch * kv_heads, self.columns + self.extra)
        return Gathered(kv_heads, keys, values, keys.view(*shape, -1), values.view(*shape, -1))

    def _pool_rows(self, kv_heads: int, translate: Translate | None) -> Tensor:
        """Rows of the pool seen as ``[slots*Hk, D]``, in the order ``[B, Hk, S + extra]``, flat."""
        key = (kv_heads, translate is not None)
        if key not in self._rows:
            # Slots that left the sliding window translate to -1; every row that could see them is past them.
            slots = self.slots if translate is None else translate(self.slots).clamp_min(0)
            if self.extra:
                slots = torch.cat([slots, slots[:, :1].expand(-1, self.extra)], 1)
            head = torch.arange(kv_heads, device=slots.device)
            self._rows[key] = (slots[:, None, :] * kv_heads + head[None, :, None]).view(-1)
        return self._rows[key]
