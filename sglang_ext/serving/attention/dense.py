"""Batched attention for few query rows per request (decode, verification, mask rows), in pure torch.

Shape legend: B requests, R query rows per request (padded), S key columns (padded), Hk key/value heads, g query heads
per key/value head, D head size, M inline key columns, K block size, G mask groups.

A :class:`DenseGroup` is the part of a forward pass that is the same for all layers: which pool slots each request
reads, which query rows belong to it, and who sees whom. Each layer then costs two gathers, two batched matrix products
and one softmax, whatever the number of requests. Query heads that share a key/value head are rows of the same product,
so keys and values are never repeated.

Measured choices (one core, bf16 and fp32): ``index_select`` into a reused buffer is 5 to 8 times faster than
``pool[slots]``; the batched products beat the fused flash kernel 2 to 4 times up to some sixteen rows per request in
bf16 and equal it in fp32; columns are padded to a multiple of :data:`COLUMN_STEP` because the bf16 product compiles a
kernel for every new shape (about a millisecond).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sglang_ext.core.masks import CLEAN, visible

COLUMN_STEP = 64
HIDDEN = 1 << 30
"""Key position of a padding column: behind every anchor."""

Translate = Callable[[Tensor], Tensor]
"""Slots of the full pool to slots of the sliding-window pool."""

MAX_GROUPS = 3
SPLIT_PAYS_COLUMNS = 512
"""A further length bucket must save this many padded key columns to be worth its extra kernel calls."""


def padded_columns(length: int) -> int:
    """Return the number of key columns computed for ``length`` keys."""
    return max(COLUMN_STEP, -(-length // COLUMN_STEP) * COLUMN_STEP)


def split_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Partition request indices into at most :data:`MAX_GROUPS` buckets of similar key length.

    A bucket is split where that saves the most padded columns, and only if it saves :data:`SPLIT_PAYS_COLUMNS`.
    Indices inside a bucket ascend, so a single bucket is the batch in its own order.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    buckets = [order]
    while len(buckets) < MAX_GROUPS:
        saving, cut, at = max((*_best_cut(bucket, lengths), n) for n, bucket in enumerate(buckets))
        if saving < SPLIT_PAYS_COLUMNS:
            break
        bucket = buckets.pop(at)
        buckets += [bucket[:cut], bucket[cut:]]
    return [sorted(bucket) for bucket in buckets]


def _best_cut(bucket: list[int], lengths: Sequence[int]) -> tuple[int, int]:
    """Return (columns saved, position) of the best cut of a bucket sorted by descending length."""
    longest = padded_columns(lengths[bucket[0]])
    cuts = [((longest - padded_columns(lengths[bucket[n]])) * (len(bucket) - n), n) for n in range(1, len(bucket))]
    return max(cuts, default=(0, 0))


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


def attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float, sinks: Tensor | None) -> Tensor:
    """Return softmax(scaling * query @ keys^T + bias) @ values.

    Args:
        query: ``[N, rows, D]``.
        keys: ``[N, S, D]``.
        values: ``[N, S, Dv]``.
        bias: ``[N, rows, S]``, 0 where a row may look and -inf where not; every row sees at least one key.
        scaling: multiplies the scores.
        sinks: ``[N, rows, 1]`` extra logits that take probability mass and carry no value, or None.
    """
    scores = torch.baddbmm(bias, query, keys.transpose(1, 2), alpha=scaling)
    if sinks is None:
        return torch.bmm(torch.softmax(scores, -1), values)
    weights = torch.softmax(torch.cat([scores, sinks.to(scores.dtype)], -1), -1)
    return torch.bmm(weights[..., :-1], values)


def fold_heads(query: Tensor, rows: int, kv_heads: int) -> Tensor:
    """``[B*R, Hq, D]`` to ``[B*Hk, g*R, D]``: query heads of one key/value head become rows (a view when R is 1)."""
    heads, size = query.shape[-2:]
    split = query.reshape(-1, rows, kv_heads, heads // kv_heads, size)
    return split.permute(0, 2, 3, 1, 4).reshape(-1, heads // kv_heads * rows, size)


def unfold_heads(out: Tensor, rows: int, kv_heads: int) -> Tensor:
    """Inverse of :func:`fold_heads`: ``[B*Hk, g*R, D]`` to ``[B*R, Hq, D]``."""
    group, size = out.shape[1] // rows, out.shape[2]
    split = out.view(-1, kv_heads, group, rows, size)
    return split.permute(0, 3, 1, 2, 4).reshape(-1, kv_heads * group, size)


def bias_of(seen: Tensor, kv_heads: int, group: int, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask ``[B, R, S]`` into the additive bias ``[B*Hk, g*R, S]`` of :func:`attend`."""
    batch, rows, columns = seen.shape
    bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
    return bias[:, None, None].expand(batch, kv_heads, group, rows, columns).reshape(-1, group * rows, columns)


def sink_rows(sinks: Tensor, batch: int, rows: int, kv_heads: int) -> Tensor:
    """Lay out per-head sink logits ``[Hq]`` as ``[B*Hk, g*R, 1]``."""
    group = sinks.numel() // kv_heads
    return sinks.view(1, kv_heads, group, 1).expand(batch, kv_heads, group, rows).reshape(-1, group * rows, 1)


class DenseGroup:
    """Requests attended in one batched product, and everything about them that all layers share."""

    def __init__(
        self,
        index: int,
        slots: Tensor,
        kv_lens: Sequence[int],
        query_lens: Sequence[int],
        first_rows: Sequence[int],
        workspace: Workspace,
        allowed: Sequence[Tensor] | None = None,
    ) -> None:
        """Describe one bucket.

        Args:
            index: number of the bucket inside the forward pass (names its scratch buffers).
            slots: ``[B, S]`` pool slot of every key; padding columns hold any slot of the same request.
            kv_lens: keys of each request, its own query rows included.
            query_lens: query rows of each request, the last ones of its sequence.
            first_rows: row of the packed query tensor where each request starts.
            workspace: scratch buffers.
            allowed: per request a boolean ``[rows, keys]`` that replaces the causal rule (token trees), or None.
        """
        self.index = index
        self.slots = slots
        self.kv_lens = list(kv_lens)
        self.query_lens = list(query_lens)
        self.rows = max(query_lens)
        self.workspace = workspace
        self.allowed = allowed
        self.reserved = 0
        self.gathered_layer: int | None = None
        self._biases: dict[tuple[bool, int | None, int, int, torch.dtype], Tensor] = {}
        self._head_rows: dict[tuple[int, bool], Tensor] = {}
        device = slots.device
        self.key_lens = torch.tensor(self.kv_lens, device=device)
        self.row_lens = torch.tensor(self.query_lens, device=device)
        lane = torch.arange(self.rows, device=device)
        inside = torch.minimum(lane, self.row_lens[:, None] - 1)
        self.query_position = self.key_lens[:, None] - self.row_lens[:, None] + inside
        self.packed = torch.tensor(list(first_rows), device=device)[:, None] + inside
        self.ragged = min(query_lens) != self.rows
        self.valid = (lane < self.row_lens[:, None]).view(-1).nonzero().view(-1) if self.ragged else None

    @property
    def batch(self) -> int:
        """Requests in the group."""
        return self.slots.shape[0]

    @property
    def columns(self) -> int:
        """Padded pool key columns S."""
        return self.slots.shape[1]

    def key_position(self) -> Tensor:
        """``[B, S]`` position of every pool key, :data:`HIDDEN` for padding."""
        position = torch.arange(self.columns, device=self.slots.device)
        return torch.where(position < self.key_lens[:, None], position, HIDDEN)

    def seen(self, causal: bool, window: int | None) -> Tensor:
        """Return ``[B, R, S]``: which pool keys each query row may look at."""
        keys = self.key_position()
        anchor = self.query_position if causal else (self.key_lens[:, None] - 1).expand_as(self.query_position)
        seen = visible(anchor, torch.full_like(anchor, CLEAN), keys, torch.full_like(keys, CLEAN))
        if causal and self.allowed is not None:
            for row, allowed in enumerate(self.allowed):
                seen[row, : allowed.shape[0], : allowed.shape[1]] = allowed
        if window is not None:
            seen &= keys[:, None, :] >= self.query_position[:, :, None] - window
        return seen

    def bias(self, causal: bool, window: int | None, kv_heads: int, group: int, dtype: torch.dtype) -> Tensor:
        """Additive mask ``[B*Hk, g*R, S]``, built once per forward pass and kind of layer."""
        key = (causal, window, kv_heads, group, dtype)
        if key not in self._biases:
            self._biases[key] = bias_of(self.seen(causal, window), kv_heads, group, dtype)
        return self._biases[key]

    def reserve(self, columns: int) -> None:
        """Keep ``columns`` extra key columns at the end of the scratch buffers for inline keys."""
        if columns != self.reserved:
            self.reserved = columns
            self._head_rows.clear()
            self.gathered_layer = None

    def head_rows(self, kv_heads: int, translate: Translate | None) -> Tensor:
        """Rows of the pool viewed as ``[slots*Hk, D]``, ordered ``[B, Hk, S + reserved]``, flat."""
        key = (kv_heads, translate is not None)
        if key not in self._head_rows:
            slots = self.slots if translate is None else translate(self.slots).clamp_min(0)
            if self.reserved:
                slots = torch.cat([slots, slots[:, :1].expand(-1, self.reserved)], 1)
            head = torch.arange(kv_heads, device=slots.device)
            self._head_rows[key] = (slots[:, None, :] * kv_heads + head[None, :, None]).view(-1)
        return self._head_rows[key]

    def gather(self, layer: int, key_pool: Tensor, value_pool: Tensor, translate: Translate | None) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer as ``[B*Hk, S + reserved, D]``; a second call for the layer is free."""
        kv_heads = key_pool.shape[1]
        rows = self.head_rows(kv_heads, translate)
        found = []
        for role, pool in (("key", key_pool), ("value", value_pool)):
            out = self.workspace.take(role, self.index, rows.numel(), pool.shape[2], pool)
            if self.gathered_layer != layer:
                torch.index_select(pool.view(-1, pool.shape[2]), 0, rows, out=out)
            found.append(out.view(self.batch * kv_heads, -1, pool.shape[2]))
        self.gathered_layer = layer
        return found[0], found[1]
