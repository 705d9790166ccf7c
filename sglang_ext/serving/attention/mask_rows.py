"""Attention of mask rows: pooled keys of the request, then the keys of their own group, in one masked SDPA call.

Mask rows never enter the KV pool: their keys and values live for one pass and are appended inline after the request's
pooled keys (FlexDraft section 1). Everything that does not change from layer to layer is computed once per pass.

Shape legend: B requests, G mask groups, K block size, R = G * K padded mask rows, S pooled keys, N flat mask rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_ext.core.block import BlockLayout, RowMap, mask_rows_mask


class MaskAttention(Protocol):
    """What the walk needs: plan the mask rows of a pass once, then attend them in every deep layer."""

    def prepare(self, slots: Tensor, layout: BlockLayout, keys: int) -> Any:
        """Plan the mask rows of ``layout`` for requests in ``slots [B]``; ``keys`` bounds the pooled lengths."""

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, meta: Any) -> Tensor:
        """Return ``[N, heads * D]`` for flat mask rows q ``[N, heads, D]``, k and v ``[N, kv_heads, D]``."""


class MaskRowMeta(NamedTuple):
    """What one pass needs in every layer.

    Attributes:
        slots: ``[B, S]`` pool slots of each request's keys; entries past its length repeat slot 0 and are masked.
        mask: ``[B, 1, group * R, S + R]`` additive or boolean mask, query heads of one KV head stacked.
        rows: map between flat ``[N]`` and padded ``[B, R]`` mask rows.
    """

    slots: Tensor
    mask: Tensor
    rows: RowMap


class MaskRowAttention:
    """The :class:`MaskAttention` of any device: it reads the pool itself, beside whatever backend the target uses.

    Args:
        model_runner: the host's target runner; its pools may be allocated after construction.
        heads_per_group: query heads that share one KV head.
    """

    def __init__(self, model_runner: Any, heads_per_group: int) -> None:
        self._runner = model_runner
        self._group = heads_per_group

    def prepare(self, slots: Tensor, layout: BlockLayout, keys: int) -> MaskRowMeta:
        """Plan the mask rows of ``layout`` for requests in ``slots [B]``; ``keys`` is S, the largest pooled length."""
        table = self._runner.req_to_token_pool.req_to_token
        position = torch.arange(keys, device=table.device)
        length = (layout.committed + layout.clean.counts).unsqueeze(-1)
        # Slot 0 is the pool's padding slot: always readable, and every key past the length is masked.
        pool_slots = torch.where(position < length, table[slots, :keys].long(), 0)
        allowed = mask_rows_mask(layout, keys)
        mask = allowed.repeat(1, self._group, 1).unsqueeze(1)
        return MaskRowMeta(pool_slots, mask, layout.mask)

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, meta: MaskRowMeta) -> Tensor:
        """Return ``[N, heads * D]`` for flat mask rows q ``[N, heads, D]``, k and v ``[N, kv_heads, D]``."""
        pool = self._runner.token_to_kv_pool
        keys = pool.get_key_buffer(layer.layer_id)
        values = pool.get_value_buffer(layer.layer_id)
        kv_heads, head_dim = k.shape[1], q.shape[2]
        inline_k, inline_v, queries = meta.rows.pad(k), meta.rows.pad(v), meta.rows.pad(q)
        batch, rows = queries.shape[:2]
        all_k = torch.cat([keys[meta.slots].to(k.dtype), inline_k], dim=1).transpose(1, 2)
        all_v = torch.cat([values[meta.slots].to(v.dtype), inline_v], dim=1).transpose(1, 2)
        stacked = queries.view(batch, rows, kv_heads, self._group, head_dim).permute(0, 2, 3, 1, 4)
        stacked = stacked.reshape(batch, kv_heads, self._group * rows, head_dim)
        out = F.scaled_dot_product_attention(stacked, all_k, all_v, attn_mask=meta.mask, scale=layer.scaling)
        out = out.view(batch, kv_heads, self._group, rows, -1).permute(0, 3, 1, 2, 4)
        return meta.rows.flatten(out.reshape(batch, rows, -1))
