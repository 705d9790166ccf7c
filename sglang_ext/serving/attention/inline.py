"""Mask rows on the CPU: pooled keys of the request and inline keys of the rows themselves in one batched product.

Mask rows never enter the pool. Their keys and values are written into the last columns of the buffers that hold the
gathered pool keys, so a layer needs no concatenation; where the verify rows of the same pass have gathered the same
keys for the layer, they are not gathered again.

Shape legend: B requests, R mask rows per request (padded), S longest pooled length, T buffer columns, Hk key/value
heads, Hq query heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_ext.core.block import BlockLayout, RowMap, mask_rows_mask
from sglang_ext.serving.attention.dense import DenseKernel, bias_of, fold_heads, unfold_heads
from sglang_ext.serving.attention.gather import Gather, Gathered, Translate, Workspace, padded_columns


@dataclass
class InlineRows:
    """Mask rows of one pass.

    Attributes:
        requests: ``[B]`` rows of the slot table.
        kv_lens: pooled keys of each request, verify rows of the pass included.
        allowed: ``[B, R, S + R]`` bool, who sees whom: pooled keys first, then the mask rows.
        gather: source of the pooled keys, once the first layer has asked for it.
    """

    requests: Tensor
    kv_lens: list[int]
    allowed: Tensor
    gather: Gather | None = None
    _kernels: dict[tuple[int, torch.dtype], DenseKernel] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """R."""
        return self.allowed.shape[1]

    @property
    def columns(self) -> int:
        """T: pooled keys first, the rows' own keys last, padding between."""
        return padded_columns(self.allowed.shape[2])

    def kernel(self, source: Gathered, heads: int, dtype: torch.dtype, workspace: Workspace) -> DenseKernel:
        """The product over pooled and inline keys, built once per pass."""
        key = (heads, dtype)
        held = self._kernels.get(key)
        if held is None or held.source is not source:
            batch, rows, keys = self.allowed.shape
            seen = self.allowed.new_zeros(batch, rows, self.columns)
            seen[..., : keys - rows] = self.allowed[..., : keys - rows]
            seen[..., self.columns - rows :] = self.allowed[..., keys - rows :]
            bias = bias_of(seen, source.kv_heads, heads // source.kv_heads, dtype)
            held = self._kernels[key] = DenseKernel(source, self.columns, bias, workspace)
        return held


def attend_inline(
    plan: InlineRows,
    gather: Gather,
    pools: tuple[Tensor, Tensor, Translate | None],
    layer: Any,
    rows: tuple[Tensor, Tensor, Tensor],
    workspace: Workspace,
) -> Tensor:
    """Attend padded mask rows: q ``[B*R, Hq, D]``, k and v ``[B*R, Hk, D]`` to ``[B*R, Hq, Dv]``."""
    q, k, v = rows
    kv_heads = k.shape[1]
    gather.widen(plan.columns)
    source = gather.read(layer.layer_id, *pools)
    for buffer, own in ((source.keys, k), (source.values, v)):
        inline = own.view(-1, plan.rows, kv_heads, own.shape[2]).transpose(1, 2)
        buffer.view(-1, kv_heads, plan.columns, own.shape[2])[:, :, plan.columns - plan.rows :] = inline
    kernel = plan.kernel(source, q.shape[1], q.dtype, workspace)
    out = kernel.attend(fold_heads(q, plan.rows, kv_heads), layer.scaling, None)
    return unfold_heads(out, plan.rows, kv_heads)


class InlineMeta(NamedTuple):
    """What :class:`SdpaMaskRows` carries from :meth:`~SdpaMaskRows.prepare` to every layer."""

    plan: InlineRows
    rows: RowMap


class SdpaMaskRows:
    """The :class:`~.mask_rows.MaskAttention` of the CPU, over :class:`~.sdpa.SdpaBackend`.

    Args:
        model_runner: the host's target runner; its backend may be built after construction.
    """

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner

    def prepare(self, slots: Tensor, layout: BlockLayout, keys: int) -> InlineMeta:
        """Plan the mask rows of ``layout`` for requests in ``slots [B]``; ``keys`` is not needed here."""
        kv_lens = (layout.committed + layout.clean.counts).tolist()
        allowed = mask_rows_mask(layout, max(kv_lens))
        return InlineMeta(self._runner.attn_backend.prepare_mask_rows(slots, kv_lens, allowed), layout.mask)

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, meta: InlineMeta) -> Tensor:
        """Return ``[N, Hq * Dv]`` for flat mask rows q ``[N, Hq, D]``, k and v ``[N, Hk, D]``."""
        padded = [meta.rows.pad(part).flatten(0, 1) for part in (q, k, v)]
        out = self._runner.attn_backend.attend_mask_rows(layer, *padded, meta.plan)
        return meta.rows.flatten(out.reshape(meta.rows.batch, meta.rows.width, -1))
