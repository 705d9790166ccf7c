"""A drafter over taps as a torch module, for training and for checking a server against (DFlare section 3).

Block input is the bonus token followed by K - 1 masks. Every layer lets the block attend, without causal order, to the
committed context and to itself; keys and values of the context come from fused taps of the target.

Shape legend: N sequences, A blocks (anchors) per sequence, K block size, S context positions, T taps, H hidden,
V vocabulary, D drafter layers, Hq/Hkv query and key/value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_ext.models.blocks import block_attention, context_bias, only_listed
from sglang_ext.models.tapped.checkpoint import validate_against_target
from sglang_ext.models.tapped.config import TappedConfig
from sglang_ext.models.tapped.rope import rope_tables
from sglang_ext.models.target import Target, apply_rope, rms_norm


@dataclass(frozen=True)
class TapContext:
    """What A blocks of each of N sequences look at.

    ``taps [N, S, T, H]`` are outputs of the tapped target layers at positions 0..S-1; rows past a sequence's end may
    hold anything finite, because no anchor reaches them. ``anchors [N, A]`` is the last accepted position of each
    block, ``bonus_ids [N, A]`` the token after it.
    """

    taps: Tensor
    anchors: Tensor
    bonus_ids: Tensor


class _Attention(nn.Module):
    def __init__(self, config: TappedConfig) -> None:
        super().__init__()
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        if config.separate_context_projections:
            self.k_proj_target = nn.Linear(config.hidden_size, key, bias=False)
            self.v_proj_target = nn.Linear(config.hidden_size, key, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim)
        self.k_norm = nn.RMSNorm(config.head_dim)


class _FeedForward(nn.Module):
    def __init__(self, config: TappedConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class _Layer(nn.Module):
    def __init__(self, config: TappedConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size)
        self.mlp = _FeedForward(config)


class TappedModel(nn.Module):
    """The part DFlare and DFlash share; ``state_dict`` names are those of a checkpoint.

    Parameters are fp32 masters; the computation runs in the target's dtype. A subclass says how taps are fused.

    Raises:
        Refusal: if the configuration was made for another target.
    """

    def __init__(self, target: Target, config: TappedConfig) -> None:
        super().__init__()
        validate_against_target(config, target.hf_config)
        self.config, self.target = config, target
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.hidden_norm = nn.RMSNorm(config.hidden_size)
        self.norm = nn.RMSNorm(config.hidden_size)
        if config.mask_token_id is None:
            self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        self._add_fusion()
        for name, parameter in self.named_parameters():
            if name.endswith("_proj.weight") or "_proj_target." in name:
                nn.init.normal_(parameter, std=0.02)
        self.to(device=target.device, dtype=torch.float32)
        if config.draft_vocab_size is not None:
            # Filled by ``load_state_dict``; until then the first ids stand in.
            self.register_buffer(
                "draft_token_ids", torch.arange(config.draft_vocab_size, dtype=torch.int32, device=target.device)
            )
        self._tables: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def _add_fusion(self) -> None:
        """Add the parameters that bring the taps together."""
        raise NotImplementedError

    def fuse(self, taps: Tensor) -> Tensor:
        """Return the context state of every layer, ``[D, ..., H]``, from taps ``[..., T, H]``."""
        raise NotImplementedError

    @property
    def layer_taps(self) -> list[int]:
        """For each layer the place in ``target_layer_ids`` of the tap at its own relative depth."""
        count, depth = len(self.config.target_layer_ids), self.config.num_layers
        return [min(count - 1, layer * count // depth) for layer in range(depth)]

    def context_kv(self, layer: int, fused: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys (rotated) and values ``[..., Hkv, D]`` of context states ``[..., H]`` at ``positions [...]``."""
        attention = self.layers[layer].self_attn
        separate = self.config.separate_context_projections
        key = attention.k_proj_target if separate else attention.k_proj
        value = attention.v_proj_target if separate else attention.v_proj
        cos, sin = self._rope(positions)
        return self._keys(attention, key, fused, cos, sin), self._heads(value, fused)

    def block_input(self, bonus_ids: Tensor) -> Tensor:
        """Return ``[..., K, H]``: the embedding of each bonus token ``[...]``, then masks."""
        dtype = self.target.dtype
        if self.config.mask_token_id is None:
            mask = self.mask_embedding.to(dtype)
        else:
            mask = self.target.embedding[self.config.mask_token_id]
        bonus = F.embedding(bonus_ids, self.target.embedding)[..., None, :]
        return torch.cat((bonus, mask.expand(*bonus_ids.shape, self.config.block_size - 1, -1)), dim=-2)

    def forward(self, context: TapContext) -> Tensor:
        """Return ``[N, A, K-1, H]``: the final-normed hidden states of slots 1..K-1 (slot 0 is never used)."""
        fused = self.fuse(context.taps)
        span, device = context.taps.shape[1], context.anchors.device
        places = torch.arange(span, device=device)
        keys_values = []
        for index in range(self.config.num_layers):
            keys, values = self.context_kv(index, fused[index], places)
            keys_values.append((keys.transpose(1, 2), values.transpose(1, 2)))
        return self.block(context.anchors, context.bonus_ids, keys_values)

    def block(self, anchors: Tensor, bonus_ids: Tensor, keys_values: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the states ``[N, A, K-1, H]`` of slots 1..K-1 from context keys and values ``[N, Hkv, S, D]``."""
        config, target = self.config, self.target
        slots = torch.arange(config.block_size, device=anchors.device)
        cos, sin = self._rope(anchors[..., None] + 1 + slots)
        bias = context_bias(anchors, keys_values[0][0].shape[2], target.dtype)
        hidden = self.block_input(bonus_ids)
        for index, (layer, (keys, values)) in enumerate(zip(self.layers, keys_values, strict=True)):
            # Slot 0 of the last layer would only produce the output that is discarded.
            first = 1 if index == config.num_layers - 1 else 0
            normed = self._norm(layer.input_layernorm, hidden)
            attention = layer.self_attn
            q = self._keys(attention, attention.q_proj, normed[:, :, first:], cos[:, :, first:], sin[:, :, first:])
            k = self._keys(attention, attention.k_proj, normed, cos, sin)
            v = self._heads(attention.v_proj, normed)
            mixed = block_attention(q, k, v, keys, values, bias)
            hidden = hidden[:, :, first:] + _linear(attention.o_proj, mixed)
            hidden = hidden + self._feed_forward(layer.mlp, self._norm(layer.post_attention_layernorm, hidden))
        return self._norm(self.norm, hidden)

    def head_inputs(self, normed: Tensor, bonus_ids: Tensor) -> tuple[Tensor, None]:
        """What enters the LM head; a drafter over taps has no calibrator."""
        return normed, None

    def logits(self, context: TapContext) -> Tensor:
        """Logits ``[N, A, K-1, V]`` of slots 1..K-1; -inf for tokens the drafter does not propose."""
        logits = F.linear(self(context), self.target.head)
        return only_listed(logits, self.draft_token_ids if self.config.draft_vocab_size is not None else None)

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        last = int(positions.max()) + 1
        if self._tables[0].shape[0] < last:
            self._tables = rope_tables(self.config, max(last, 512), self.target.device)
        cos, sin = self._tables
        return cos[positions].to(self.target.dtype), sin[positions].to(self.target.dtype)

    def _keys(self, attention: Any, projection: nn.Linear, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Projected, normed and rotated heads ``[..., heads, D]``: queries by ``q_proj``, keys by any other."""
        norm = attention.q_norm if projection is attention.q_proj else attention.k_norm
        heads = self._norm(norm, self._heads(projection, rows))
        return apply_rope(heads, cos[..., None, :], sin[..., None, :])

    def _heads(self, projection: nn.Linear, rows: Tensor) -> Tensor:
        return _linear(projection, rows).unflatten(-1, (-1, self.config.head_dim))

    def _norm(self, norm: nn.RMSNorm, rows: Tensor) -> Tensor:
        return rms_norm(rows, norm.weight.to(rows.dtype), self.config.rms_norm_eps)

    def _feed_forward(self, mlp: Any, rows: Tensor) -> Tensor:
        return _linear(mlp.down_proj, F.silu(_linear(mlp.gate_proj, rows)) * _linear(mlp.up_proj, rows))


def _linear(projection: nn.Linear, rows: Tensor) -> Tensor:
    return F.linear(rows, projection.weight.to(rows.dtype))
