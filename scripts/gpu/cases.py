"""Random passes over a paged pool, and dense attention in fp32 to hold the kernels against.

Shape legend: B requests, K block size, P pool slots, Hq query heads, Hk key/value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from sglang_ext.core.block import BlockLayout, clean_mask, mask_rows_mask
from sglang_ext.serving.attention.flashinfer_calls import HeadShape


class Case:
    """One pass: requests at random slots, rows of random numbers.

    Args:
        shape: heads.
        committed, widths, groups: per request.
        block: K.
        device: of every tensor.
        tree: give the clean rows random parents.
        seed: of slots and numbers.
    """

    def __init__(
        self,
        shape: HeadShape,
        committed: Sequence[int],
        widths: Sequence[int],
        groups: Sequence[int],
        block: int,
        device: str,
        *,
        tree: bool = False,
        seed: int = 0,
    ) -> None:
        self.shape, self.device = shape, device
        random = torch.Generator().manual_seed(seed)
        parent = None
        if tree:
            rows = [[-1, *(int(torch.randint(i, (1,), generator=random)) for i in range(1, max(widths)))]]
            parent = torch.tensor(rows * len(widths)).to(device)
        self.layout = BlockLayout.ragged(committed, widths, groups, block, parent=parent, device=device)
        lengths = [n + w for n, w in zip(committed, widths)]
        # One slot more per mask row, for the forms that need mask rows in the pool.
        spare = [g * block for g in groups]
        total = sum(lengths) + sum(spare) + 1
        order = torch.randperm(total - 1, generator=random) + 1
        table = torch.zeros(len(lengths), max(n + m for n, m in zip(lengths, spare)), dtype=torch.int32)
        start = 0
        for i, length in enumerate(n + m for n, m in zip(lengths, spare)):
            table[i, :length] = order[start : start + length].to(torch.int32)
            start += length
        self.table = table.to(device)
        self.requests = torch.arange(len(lengths), device=device)
        self.lengths = lengths
        on_device = torch.Generator(device=device).manual_seed(seed)

        def numbers(rows: int, heads: int) -> Tensor:
            made = torch.randn(rows, heads, shape.head_dim, generator=on_device, device=device)
            return made.to(shape.dtype)

        self.pool_k, self.pool_v = (numbers(total, shape.kv_heads).to(shape.kv_dtype) for _ in range(2))
        self.clean_q = numbers(self.layout.clean.total, shape.heads)
        self.rows = tuple(numbers(self.layout.mask.total, h) for h in (shape.heads, shape.kv_heads, shape.kv_heads))
        self.layer = SimpleNamespace(layer_id=0, scaling=shape.scaling, k_scale_float=None, v_scale_float=None)
        self.source = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=SimpleNamespace(
                get_key_buffer=lambda _: self.pool_k, get_value_buffer=lambda _: self.pool_v
            ),
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """Dense attention in fp32: q ``[Q, Hq, D]``, k and v ``[S, Hk, D]``, ``seen [Q, S]``."""
        group = self.shape.heads // self.shape.kv_heads
        k, v = (part.float().repeat_interleave(group, 1) for part in (k, v))
        scores = torch.einsum("qhd,shd->qhs", q.float(), k) * self.shape.scaling
        weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
        return torch.einsum("qhs,shd->qhd", weights, v).flatten(1)

    def _pooled(self, request: int) -> tuple[Tensor, Tensor]:
        slots = self.table[request, : self.lengths[request]].long()
        return self.pool_k[slots].to(self.shape.dtype), self.pool_v[slots].to(self.shape.dtype)

    def mask_oracle(self) -> Tensor:
        """Return ``[N, Hq * D]`` fp32: what the flat mask rows must give."""
        keys = max(self.lengths)
        seen = mask_rows_mask(self.layout, keys)
        outs, start = [], 0
        for i, (length, count) in enumerate(zip(self.lengths, self.layout.mask.carried)):
            q, k, v = (part[start : start + count] for part in self.rows)
            pool_k, pool_v = self._pooled(i)
            mask = torch.cat([seen[i, :count, :length], seen[i, :count, keys : keys + count]], 1)
            outs.append(self.attend(q, torch.cat([pool_k, k]), torch.cat([pool_v, v]), mask))
            start += count
        return torch.cat(outs)

    def clean_oracle(self) -> Tensor:
        """Return ``[N, Hq * D]`` fp32: what the flat clean rows must give."""
        seen = clean_mask(self.layout, max(self.lengths))
        outs, start = [], 0
        for i, (length, count) in enumerate(zip(self.lengths, self.layout.clean.carried)):
            rows = self.clean_q[start : start + count]
            outs.append(self.attend(rows, *self._pooled(i), seen[i, :count, :length]))
            start += count
        return torch.cat(outs)
