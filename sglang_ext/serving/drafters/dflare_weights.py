"""A DFlare or DFlash drafter's weights as the server holds them, and the arithmetic of one of its layers.

The two methods differ in how taps become the context of a layer. DFlare weighs the taps layer by layer and projects
them with matrices of their own; DFlash fuses them once for all layers and projects them with the block's matrices.
Which of the two a checkpoint means is told by its tensors alone.

Under ``--tp-size`` a rank holds its own heads and its own share of the feed-forward parts; two sums over the ranks per
layer make block rows whole again. Fusion is done whole on every rank, keys and values of context for its own heads.

Shape legend: D drafter layers, T taps, N tokens or rows, H hidden, Hq query heads and Hk key/value heads of this rank,
Dh head size, B requests, K block size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_ext.models.dflare.config import FUSION_WEIGHTS
from sglang_ext.models.dflash.config import FUSION_MATRIX
from sglang_ext.models.tapped.config import TappedConfig
from sglang_ext.models.target import apply_rope, rms_norm
from sglang_ext.models.weights import DRAFT_TOKENS
from sglang_ext.serving.drafters.sharding import HeadShard, own_part
from sglang_ext.serving.parallel import Ranks

CONTEXT_CHUNK = 2048
"""Tokens fused and projected at once: bounds the fp32 copies of their taps."""


class PoolLayer(NamedTuple):
    """A drafter layer as attention sees it."""

    layer_id: int
    scaling: float


class BlockLayer:
    """One drafter layer: attention and feed-forward weights of block rows, q, k, v and gate, up fused."""

    def __init__(self, tensors: Mapping[str, Tensor], index: int) -> None:
        prefix = f"layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        self.input_norm = tensors[f"{prefix}input_layernorm.weight"]
        self.qkv = torch.cat([tensors[f"{attention}{name}_proj.weight"] for name in "qkv"]).contiguous()
        self.q_norm = tensors[f"{attention}q_norm.weight"]
        self.k_norm = tensors[f"{attention}k_norm.weight"]
        self.out = tensors[f"{attention}o_proj.weight"].contiguous()
        self.post_norm = tensors[f"{prefix}post_attention_layernorm.weight"]
        self.gate_up = torch.cat([tensors[f"{mlp}{name}_proj.weight"] for name in ("gate", "up")]).contiguous()
        self.down = tensors[f"{mlp}down_proj.weight"].contiguous()

    def tensors(self) -> list[Tensor]:
        """Return every tensor held."""
        return list(vars(self).values())


class DFlareWeights:
    """Loaded checkpoint, moved to the target's device and dtype.

    Args:
        config: the drafter's config.
        tensors: the checkpoint's tensors by name.
        dtype: the target's compute dtype.
        device: the target's device.
        rope: cosines and sines ``[P, Dh]`` of every position a row may sit at.
        ranks: the processes that share the target.
    """

    def __init__(
        self,
        config: TappedConfig,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device | str,
        rope: tuple[Tensor, Tensor],
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = Ranks() if ranks is None else ranks
        #: The heads of this rank.
        self.heads = HeadShard(
            self.ranks.rank, self.ranks.size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        held = {
            name: tensor.to(device=device, dtype=dtype)
            for name, tensor in own_part(tensors, self.heads).items()
            if name != DRAFT_TOKENS
        }
        #: ``[R]`` int64 ids of the tokens that can be proposed; None means all.
        self.draft_tokens: Tensor | None = None
        if DRAFT_TOKENS in tensors:
            self.draft_tokens = tensors[DRAFT_TOKENS].to(device=device, dtype=torch.int64)
        self._depth = config.num_layers
        self._heads = (self.heads.own_heads, self.heads.own_kv_heads, config.head_dim)
        self._eps = config.rms_norm_eps
        self._cos, self._sin = (table.to(device=device, dtype=dtype) for table in rope)
        self._alpha: Tensor | None = None
        self._fc: Tensor | None = None
        if FUSION_WEIGHTS in tensors:
            # Tap magnitudes span two orders of magnitude: mix them in fp32.
            self._alpha = torch.softmax(tensors[FUSION_WEIGHTS].to(device=device, dtype=torch.float32), dim=1)
            self._hidden_norm = tensors["hidden_norm.weight"].to(device=device, dtype=torch.float32)
        else:
            self._fc = held[FUSION_MATRIX]
            self._hidden_norm = held["hidden_norm.weight"]
        self._norm = held["norm.weight"]
        self._layers = [BlockLayer(held, index) for index in range(self._depth)]
        self._context = torch.stack([_context_projection(held, index) for index in range(self._depth)])
        self._context_norms = torch.stack([layer.k_norm for layer in self._layers])[:, None, None]
        #: The layers as attention sees them.
        self.attention_layers = [PoolLayer(index, config.head_dim**-0.5) for index in range(self._depth)]

    @property
    def dtype(self) -> torch.dtype:
        """Of every projection, hence of the keys and values."""
        return self._norm.dtype

    @property
    def bytes(self) -> int:
        """Bytes of all tensors held."""
        held = [self._hidden_norm, self._norm, self._context, self._context_norms, self._cos, self._sin]
        held += [tensor for tensor in (self._alpha, self._fc, self.draft_tokens) if tensor is not None]
        held += [tensor for layer in self._layers for tensor in layer.tensors()]
        return sum(tensor.nbytes for tensor in held)

    def context(self, taps: list[Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values ``[D, N, Hk, Dh]`` of committed tokens.

        Args:
            taps: T target states ``[N, H]``.
            positions: ``[N]`` absolute positions.
        """
        chunks = [
            self._context_chunk([tap[start : start + CONTEXT_CHUNK] for tap in taps], part)
            for start, part in zip(
                range(0, positions.shape[0], CONTEXT_CHUNK), positions.split(CONTEXT_CHUNK), strict=True
            )
        ]
        if len(chunks) == 1:
            return chunks[0]
        return torch.cat([keys for keys, _ in chunks], dim=1), torch.cat([values for _, values in chunks], dim=1)

    def _context_chunk(self, taps: list[Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
        _, kv_heads, head_dim = self._heads
        fused = self._fuse(taps)
        count = positions.shape[0]
        if fused.shape[0] == 1:
            flat = F.linear(fused[0], self._context.flatten(0, 1))
            both = flat.view(count, self._depth, 2, kv_heads, head_dim).permute(2, 1, 0, 3, 4)
        else:
            flat = torch.bmm(fused, self._context.transpose(1, 2))
            both = flat.view(self._depth, count, 2, kv_heads, head_dim).permute(2, 0, 1, 3, 4)
        return self._rotate(rms_norm(both[0], self._context_norms, self._eps), positions), both[1]

    def _fuse(self, taps: list[Tensor]) -> Tensor:
        """Return the context states ``[D, N, H]`` of every layer, or ``[1, N, H]`` where all layers share them."""
        if self._alpha is None:
            assert self._fc is not None
            shared = F.linear(torch.cat(taps, dim=-1).to(self.dtype), self._fc)
            return rms_norm(shared, self._hidden_norm, self._eps)[None]
        stacked = torch.stack(taps).float()
        mixed = (self._alpha @ stacked.flatten(1)).view(-1, *stacked.shape[1:])
        return rms_norm(mixed, self._hidden_norm, self._eps).to(self.dtype)

    def project(self, index: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q ``[N, Hq, Dh]`` and k, and v ``[N, Hk, Dh]``, of block rows ``hidden [N, H]``."""
        layer = self._layers[index]
        heads, kv_heads, head_dim = self._heads
        rows = F.linear(rms_norm(hidden, layer.input_norm, self._eps), layer.qkv).view(hidden.shape[0], -1, head_dim)
        q, k, v = rows.split([heads, kv_heads, kv_heads], dim=1)
        q = self._rotate(rms_norm(q, layer.q_norm, self._eps), positions)
        k = self._rotate(rms_norm(k, layer.k_norm, self._eps), positions)
        return q, k, v

    def finish(self, index: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output ``[N, H]`` from its input and its attention output ``[N, Hq * Dh]``."""
        layer = self._layers[index]
        hidden = hidden + self.ranks.total(F.linear(attended, layer.out))
        gate, up = F.linear(rms_norm(hidden, layer.post_norm, self._eps), layer.gate_up).chunk(2, dim=-1)
        return hidden + self.ranks.total(F.linear(F.silu(gate) * up, layer.down))

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return ``hidden [..., H]`` as the LM head takes it."""
        return rms_norm(hidden, self._norm, self._eps)

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``[..., N, heads, Dh]`` rows at ``positions [N]``."""
        return apply_rope(heads, self._cos[positions][:, None], self._sin[positions][:, None])


def _context_projection(tensors: Mapping[str, Tensor], index: int) -> Tensor:
    """Return ``[2 * Hk * Dh, H]``: key and value projections of context, the block's own if there are none."""
    prefix = f"layers.{index}.self_attn."
    names = [f"{prefix}{name}_proj_target.weight" for name in "kv"]
    if names[0] not in tensors:
        names = [f"{prefix}{name}_proj.weight" for name in "kv"]
    return torch.cat([tensors[name] for name in names])
