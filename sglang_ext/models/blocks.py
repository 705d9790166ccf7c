"""Arithmetic of draft blocks that every method shares: who a block sees, its attention, the tokens it proposes.

Shape legend: N sequences, A blocks (anchors) per sequence, K block size, S clean keys, V vocabulary, Hq/Hkv query and
key/value heads, D head size, g = Hq / Hkv.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.core.masks import CLEAN, visible


def context_bias(anchors: Tensor, span: int, dtype: torch.dtype) -> Tensor:
    """``[N, A, S]``: 0 where a block may see a clean key, -inf elsewhere, by the one mask rule of the project.

    Args:
        anchors: ``[N, A]`` last accepted position of each block.
        span: S.
        dtype: of the result.
    """
    positions = torch.arange(span, device=anchors.device)
    sees = visible(anchors, torch.zeros_like(anchors), positions, torch.full_like(positions, CLEAN))
    return torch.where(sees, 0.0, float("-inf")).to(dtype)


def only_listed(logits: Tensor, listed: Tensor | None) -> Tensor:
    """``logits [..., V]`` with -inf for every token that is not in ``listed``; unchanged where that is None."""
    if listed is None:
        return logits
    proposed = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    proposed[listed.long()] = True
    return logits.masked_fill(~proposed, float("-inf"))


def block_attention(q: Tensor, k: Tensor, v: Tensor, clean_k: Tensor, clean_v: Tensor, bias: Tensor) -> Tensor:
    """Attention of block rows over the clean keys and their own block's keys, nothing else; ``[N, A, Kq, Hq*D]``.

    The own keys are a batch of small products, so no block-by-block score matrix exists. ``q [N, A, Kq, Hq, D]``,
    ``k``/``v [N, A, K, Hkv, D]``, ``clean_k``/``clean_v [N, Hkv, S, D]``, ``bias [N, A, S]`` additive.
    """
    count, blocks, queries, heads, size = q.shape
    kv_heads, span, own = clean_k.shape[1], clean_k.shape[2], k.shape[2]
    group = heads // kv_heads
    # [N, Hkv, A, Kq*g, D]: the query heads of one key/value head become query rows.
    grouped = q.unflatten(3, (kv_heads, group)).permute(0, 3, 1, 2, 4, 5).reshape(count, kv_heads, blocks, -1, size)
    grouped = grouped * size**-0.5
    own_k, own_v = (part.permute(0, 3, 1, 2, 4) for part in (k, v))
    clean = grouped.flatten(2, 3) @ clean_k.transpose(2, 3)
    clean = clean.unflatten(2, (blocks, -1)) + bias[:, None, :, None]
    weights = torch.cat((clean, grouped @ own_k.transpose(3, 4)), dim=-1).softmax(-1)
    from_clean, from_own = weights.split((span, own), dim=-1)
    mixed = (from_clean.flatten(2, 3) @ clean_v).unflatten(2, (blocks, -1)) + from_own @ own_v
    mixed = mixed.unflatten(3, (queries, group)).permute(0, 2, 3, 1, 4, 5)
    return mixed.reshape(count, blocks, queries, heads * size)
