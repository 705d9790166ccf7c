"""Batched attention for few query rows per request (decode, verification, mask rows), in pure torch.

Shape legend: B requests, R query rows per request (padded), S key columns (padded), Hk key/value heads, g query heads
per key/value head, Hq = g * Hk, D head size.

A :class:`DenseGroup` is the part of a forward pass that is the same for all layers: which pool slots each request
reads, which query rows belong to it, and who sees whom. Each layer then costs two gathers, two batched matrix products
and one softmax, whatever the number of requests. Query heads that share a key/value head are rows of the same product,
so keys and values are never repeated.

The arithmetic is two batched products with the scores kept in the model's dtype between them. In bf16 this is two to
four times faster on a CPU than the fused kernel (which converts to fp32 inside), at the accuracy of unfused attention;
in fp32 it is equally fast and exact to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_ext.core.masks import CLEAN, visible
from sglang_ext.serving.attention.gather import Gather, Gathered, Workspace, padded_columns

HIDDEN = 1 << 30
"""Key position of a padding column: behind every anchor."""

MAX_GROUPS = 3
SPLIT_PAYS_COLUMNS = 512
"""A further length bucket must save this many padded key columns to be worth its extra kernel calls."""


def split_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Partition request indices into at most :data:`MAX_GROUPS` buckets of similar key length.

    A bucket is split where that saves the most padded columns, and only if it saves :data:`SPLIT_PAYS_COLUMNS`.
    Indices inside a bucket ascend, so a single bucket is the batch in its own order.
    """
    buckets = [sorted(range(len(lengths)), key=lambda index: -lengths[index])]
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


class DenseKernel:
    """softmax(scaling * query @ keys^T + bias) @ values over fixed buffers, so that a layer only fills and multiplies.

    Args:
        source: gathered keys and values; every layer's contents appear in the same memory.
        columns: leading key columns that are attended.
        bias: ``[N, rows, columns]`` in the query's dtype, 0 where a row may look and -inf where not; every row sees at
            least one key.
        workspace: scratch buffers for scores and weights.
    """

    def __init__(self, source: Gathered, columns: int, bias: Tensor, workspace: Workspace) -> None:
        self.source = source
        self._bias = bias
        self._columns = columns
        self._converts = source.keys.dtype != bias.dtype
        self._keys = source.keys[:, :columns].transpose(1, 2)
        self._values = source.values[:, :columns]
        shape = bias.shape[0] * bias.shape[1], columns
        self._scores = workspace.take("scores", 0, *shape, bias).view_as(bias)
        self._weights = workspace.take("weights", 0, *shape, bias).view_as(bias)

    def attend(self, query: Tensor, scaling: float, sinks: Tensor | None) -> Tensor:
        """Return ``[N, rows, Dv]`` for ``query [N, rows, D]``; ``sinks [N, rows, 1]`` are logits without a value."""
        keys, values = self._keys, self._values
        if self._converts:
            keys, values = keys.to(query.dtype), values.to(query.dtype)
        torch.baddbmm(self._bias, query, keys, alpha=scaling, out=self._scores)
        if sinks is None:
            return torch.bmm(torch.softmax(self._scores, -1, out=self._weights), values)
        return mix_with_sinks(self._scores, values, sinks)


def mix_with_sinks(scores: Tensor, values: Tensor, sinks: Tensor) -> Tensor:
    """Weigh ``values`` by a softmax over the scores and one sink logit per row."""
    weights = torch.softmax(torch.cat([scores, sinks.to(scores.dtype)], -1), -1)
    return torch.bmm(weights[..., :-1], values)


def attend_tail(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tail: Tensor,
    scaling: float,
    sinks: Tensor | None,
    workspace: Workspace,
) -> Tensor:
    """Attend rows of one request that see all keys but some of the last: the mask is added to those only.

    Args:
        query: ``[Hk, g*R, D]``.
        keys, values: ``[Hk, S, D]``.
        tail: ``[R, T]`` additive mask of the last T keys, the same for all heads.
        scaling: multiplies the scores.
        sinks: ``[Hk, g*R, 1]`` or None.
        workspace: scratch buffers for scores and weights.
    """
    batch, rows, columns = query.shape[0], query.shape[1], keys.shape[1]
    # Fresh buffers of megabytes would be page-faulted in anew on every layer.
    scores = workspace.take("scores", 0, batch * rows, columns, query).view(batch, rows, columns)
    torch.baddbmm(scores, query, keys.transpose(1, 2), beta=0, alpha=scaling, out=scores)
    scores.view(batch, -1, tail.shape[0], columns)[..., columns - tail.shape[1] :] += tail
    if sinks is not None:
        return mix_with_sinks(scores, values, sinks)
    weights = workspace.take("weights", 0, batch * rows, columns, query).view(batch, rows, columns)
    return torch.bmm(torch.softmax(scores, -1, out=weights), values)


def fold_heads(query: Tensor, rows: int, kv_heads: int) -> Tensor:
    """``[B*R, Hq, D]`` to ``[B*Hk, g*R, D]``: query heads of one key/value head become rows (a view when R is 1)."""
    heads, size = query.shape[-2:]
    if rows == 1:
        return query.reshape(-1, heads // kv_heads, size)
    split = query.reshape(-1, rows, kv_heads, heads // kv_heads, size)
    return split.permute(0, 2, 3, 1, 4).reshape(-1, heads // kv_heads * rows, size)


def unfold_heads(out: Tensor, rows: int, kv_heads: int) -> Tensor:
    """Inverse of :func:`fold_heads`: ``[B*Hk, g*R, D]`` to ``[B*R, Hq, D]``."""
    group, size = out.shape[1] // rows, out.shape[2]
    if rows == 1:
        return out.view(-1, kv_heads * group, size)
    split = out.view(-1, kv_heads, group, rows, size)
    return split.permute(0, 3, 1, 2, 4).reshape(-1, kv_heads * group, size)


def bias_of(seen: Tensor, kv_heads: int, group: int, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask ``[B, R, S]`` into the additive bias ``[B*Hk, g*R, S]`` of :class:`DenseKernel`."""
    batch, rows, columns = seen.shape
    bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
    return bias[:, None, None].expand(batch, kv_heads, group, rows, columns).reshape(-1, group * rows, columns)


def sink_rows(sinks: Tensor, batch: int, rows: int, kv_heads: int) -> Tensor:
    """Lay out per-head sink logits ``[Hq]`` as ``[B*Hk, g*R, 1]``."""
    group = sinks.numel() // kv_heads
    return sinks.view(1, kv_heads, group, 1).expand(batch, kv_heads, group, rows).reshape(-1, group * rows, 1)


class DenseGroup:
    """Requests attended in one batched product, and everything about them that all layers share.

    Args:
        index: number of the bucket inside the forward pass (names its scratch buffers).
        slots: ``[B, S]`` pool slots, see :class:`~.gather.Gather`.
        kv_lens: keys of each request, its own query rows included.
        query_lens: query rows of each request, the last ones of its sequence.
        first_rows: row of the packed query tensor where each request starts.
        workspace: scratch buffers.
        allowed: per request a boolean ``[rows, keys]`` that replaces the causal rule (token trees), or None.
    """

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
        self.gather = Gather(index, slots, workspace)
        self.batch = len(kv_lens)
        self.rows = max(query_lens)
        self.kv_lens = list(kv_lens)
        self._allowed = allowed
        self._workspace = workspace
        self._kernels: dict[tuple[bool, int | None, int, torch.dtype], DenseKernel] = {}
        lane = torch.arange(self.rows, device=slots.device)
        row_lens = torch.tensor(list(query_lens), device=slots.device)[:, None]
        self._key_lens = torch.tensor(self.kv_lens, device=slots.device)[:, None]
        # A request with fewer rows than the longest repeats its last row: computed, then dropped.
        inside = torch.minimum(lane, row_lens - 1)
        self._query_position = self._key_lens - row_lens + inside
        self.packed = (torch.tensor(list(first_rows), device=slots.device)[:, None] + inside).view(-1)
        ragged = min(query_lens) != self.rows
        self.valid = (lane < row_lens).view(-1).nonzero().view(-1) if ragged else None

    @property
    def own_rows(self) -> Tensor:
        """Packed row numbers of the group, in packed order."""
        return self.packed if self.valid is None else self.packed[self.valid]

    def kernel(self, source: Gathered, causal: bool, window: int | None, heads: int, dtype: torch.dtype) -> DenseKernel:
        """The product for one kind of layer, built once per forward pass."""
        key = (causal, window, heads, dtype)
        held = self._kernels.get(key)
        if held is None or held.source is not source:
            bias = bias_of(self._seen(causal, window), source.kv_heads, heads // source.kv_heads, dtype)
            held = self._kernels[key] = DenseKernel(source, self.gather.columns, bias, self._workspace)
        return held

    def _seen(self, causal: bool, window: int | None) -> Tensor:
        """Return ``[B, R, S]``: which pool keys each query row may look at."""
        position = torch.arange(self.gather.columns, device=self._key_lens.device)
        position = torch.where(position < self._key_lens, position, HIDDEN)
        anchor = self._query_position if causal else (self._key_lens - 1).expand_as(self._query_position)
        seen = visible(anchor, torch.full_like(anchor, CLEAN), position, torch.full_like(position, CLEAN))
        if causal and self._allowed is not None:
            for row, allowed in enumerate(self._allowed):
                seen[row, : allowed.shape[0], : allowed.shape[1]] = allowed
        if window is not None:
            seen &= position[:, None, :] >= self._query_position[:, :, None] - window
        return seen
