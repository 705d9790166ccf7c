"""Who sees whom: the one attention-mask rule of the project.

Shape legend used everywhere: B requests, K block size, G mask groups, W clean rows in flight, S keys, Q queries.

Every row of a target pass is described by three integers:

* ``position``: its absolute position in the sequence (RoPE);
* ``group``: ``CLEAN`` for a real token, otherwise the id of the mask group it belongs to;
* ``anchor``: the last clean position it may look at. A clean row's anchor is its own position (causal attention).
  A mask row's anchor is the last accepted position its group assumes: position ``n + k`` for group ``k`` of a
  request with ``n`` committed tokens, ``p_i`` for training block ``i``.

The rule: *a query sees a clean key at or before its anchor, and a mask key of its own group; nothing else.*
Training blocks, the parallel pass, the sequential pass and the chain verification are all this one sentence
(FlexDraft sections 3 and 6); serving and training both call :func:`visible`.
"""

from __future__ import annotations

import torch
from torch import Tensor

CLEAN = -1


def visible(query_anchor: Tensor, query_group: Tensor, key_position: Tensor, key_group: Tensor) -> Tensor:
    """Return the boolean mask ``[..., Q, S]``, True where a query may attend to a key.

    Args:
        query_anchor: ``[..., Q]`` last clean position each query may see.
        query_group: ``[..., Q]`` mask group of each query, ``CLEAN`` for real tokens.
        key_position: ``[..., S]`` absolute position of each key.
        key_group: ``[..., S]`` mask group of each key, ``CLEAN`` for real tokens.
    """
    causal = key_position.unsqueeze(-2) <= query_anchor.unsqueeze(-1)
    same_group = key_group.unsqueeze(-2) == query_group.unsqueeze(-1)
    return torch.where((key_group == CLEAN).unsqueeze(-2), causal, same_group)


def tree_ancestors(parent: Tensor) -> Tensor:
    """Return ``[..., W, W]``: True where column j is row i or an ancestor of row i.

    ``parent[..., i]`` is the row index of i's parent, or -1 for the root; parents come before children. For a chain
    (``parent = [-1, 0, 1, ...]``) the result is lower triangular, which is what :func:`visible` already says; a token
    tree ands this matrix over the clean rows in flight, because two siblings share a position.
    """
    width = parent.shape[-1]
    ancestors = torch.eye(width, dtype=torch.bool, device=parent.device).expand(*parent.shape, width).clone()
    for row in range(1, width):
        up = parent[..., row]
        has_parent = up >= 0
        inherited = torch.gather(ancestors, -2, up.clamp_min(0)[..., None, None].expand(*up.shape, 1, width))
        ancestors[..., row, :] |= inherited.squeeze(-2) & has_parent.unsqueeze(-1)
    return ancestors
