"""The FlexDraft drafter as a torch module, for training and for checking a server against (FlexDraft sections 3 and 6).

Shape legend: N sequences, A blocks (anchors) per sequence, K block size, S clean keys, H hidden, V vocabulary,
D drafter layers, Hq/Hkv query and key/value heads, g = Hq / Hkv.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.blocks import block_attention, context_bias, only_listed
from sglang_ext.models.flexdraft.config import FlexDraftConfig
from sglang_ext.models.target import LayerWeights, Target, apply_rope, frozen_rms_norm, rms_norm


@dataclass(frozen=True)
class BlockContext:
    """What A blocks of each of N sequences look at.

    ``keys[i]``/``values[i]`` are ``[N, Hkv, S, head_dim]`` of target layer ``split + i``, keys rotated; rows past a
    sequence's end may hold anything finite, because no anchor reaches them. ``anchors [N, A]`` is the last accepted
    position of each block, ``bonus_ids [N, A]`` the token after it.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    anchors: Tensor
    bonus_ids: Tensor


class _Attention(nn.Module):
    def __init__(self, config: FlexDraftConfig) -> None:
        super().__init__()
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim)
            self.k_norm = nn.RMSNorm(config.head_dim)


class _DraftLayer(nn.Module):
    def __init__(self, config: FlexDraftConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)


class FlexDraftModel(nn.Module):
    """The trained part of FlexDraft on top of a frozen target; ``state_dict`` names are those of a checkpoint.

    Parameters are fp32 masters; the computation runs in the target's dtype. A new model starts from the target's own
    projections, a zero mask embedding and a calibrator that adds nothing.

    Raises:
        Refusal: if the configuration was made for a target of another shape.
    """

    def __init__(self, target: Target, config: FlexDraftConfig) -> None:
        super().__init__()
        if config.target_shape != target.shape:
            raise Refusal(
                f"the drafter is for {config.target_shape}", f"the target is {target.shape}", "use the matching target"
            )
        self.config = config
        self.target = target
        self.layers = nn.ModuleList(_DraftLayer(config) for _ in range(config.num_layers))
        self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        if config.calibrator != "none":
            width = config.hidden_size if config.calibrator == "hidden" else config.vocab_size
            self.anchor_bias_mlp = nn.Sequential(
                nn.Linear(2 * config.hidden_size, config.calibrator_rank),
                nn.SiLU(),
                nn.Linear(config.calibrator_rank, width),
            )
        self.to(device=target.device, dtype=torch.float32)
        if config.draft_vocab_size is not None:
            # Filled by ``load_state_dict``; until then the first ids stand in.
            self.register_buffer(
                "draft_token_ids", torch.arange(config.draft_vocab_size, dtype=torch.int32, device=target.device)
            )
        self._start_from_target()

    @torch.no_grad()
    def _start_from_target(self) -> None:
        for draft, layer in zip(self.layers, self.target_layers, strict=True):
            attention = draft.self_attn
            widths = (self.target.query_width, self.target.key_width, self.target.key_width)
            for name, weight in zip("qkv", layer.qkv.split(widths), strict=True):
                getattr(attention, f"{name}_proj").weight.copy_(weight)
            attention.o_proj.weight.copy_(layer.o)
            if layer.q_norm is not None and layer.k_norm is not None:
                attention.q_norm.weight.copy_(layer.q_norm)
                attention.k_norm.weight.copy_(layer.k_norm)
        if self.config.calibrator != "none":
            self.anchor_bias_mlp[2].weight.zero_()
            self.anchor_bias_mlp[2].bias.zero_()

    @property
    def target_layers(self) -> list[LayerWeights]:
        """The target layers that carry mask rows."""
        return self.target.layers[self.config.split :]

    def forward(self, context: BlockContext) -> Tensor:
        """Return n_j ``[N, A, K-1, H]``: the final-normed hidden states of slots 1..K-1 (slot 0 is never used)."""
        target, config = self.target, self.config
        count, blocks = context.anchors.shape
        slots = torch.arange(config.block_size, device=context.anchors.device)
        cos, sin = target.rope(context.anchors[..., None] + 1 + slots)
        bias = context_bias(context.anchors, context.keys[0].shape[2], target.dtype)
        hidden = self.mask_embedding.to(target.dtype).expand(count, blocks, config.block_size, -1)
        for index, (draft, layer) in enumerate(zip(self.layers, self.target_layers, strict=True)):
            # Slot 0 of the last layer would only produce the output that is discarded.
            first = 1 if index == config.num_layers - 1 else 0
            normed = frozen_rms_norm(hidden, layer.input_norm, target.eps)
            q, k, v = self._project(draft.self_attn, normed, normed[:, :, first:], cos, sin)
            mixed = block_attention(q, k, v, context.keys[index], context.values[index], bias)
            hidden = hidden[:, :, first:] + F.linear(mixed, draft.self_attn.o_proj.weight.to(target.dtype))
            hidden = target.feed_forward(layer, hidden)
        return frozen_rms_norm(hidden, target.final_norm, target.eps)

    def _project(
        self, attention: nn.Module, rows: Tensor, query_rows: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[N, A, Kq, Hq, D]`` of the query rows, k and v ``[N, A, K, Hkv, D]`` of all; q and k rotated."""
        config, dtype = self.config, self.target.dtype
        shape = (-1, config.head_dim)
        q = F.linear(query_rows, attention.q_proj.weight.to(dtype)).unflatten(-1, shape)
        k = F.linear(rows, attention.k_proj.weight.to(dtype)).unflatten(-1, shape)
        v = F.linear(rows, attention.v_proj.weight.to(dtype)).unflatten(-1, shape)
        if config.qk_norm:
            q = rms_norm(q, attention.q_norm.weight.to(dtype), self.target.eps)
            k = rms_norm(k, attention.k_norm.weight.to(dtype), self.target.eps)
        skipped = rows.shape[2] - query_rows.shape[2]
        cos, sin = cos[..., None, :], sin[..., None, :]
        return apply_rope(q, cos[:, :, skipped:], sin[:, :, skipped:]), apply_rope(k, cos, sin), v

    def calibration(self, normed: Tensor, bonus_ids: Tensor) -> Tensor | None:
        """The calibrator's hidden layer ``[N, A, K-1, r]`` after SiLU, or None without a calibrator.

        Its input is concat(E(bonus), n_j); the bonus half is computed once per block.
        """
        if self.config.calibrator == "none":
            return None
        dtype, first = self.target.dtype, self.anchor_bias_mlp[0]
        from_bonus, from_slot = first.weight.to(dtype).split(self.config.hidden_size, dim=1)
        bonus = F.linear(F.embedding(bonus_ids, self.target.embedding), from_bonus, first.bias.to(dtype))
        return F.silu(F.linear(normed, from_slot) + bonus[:, :, None])

    def head_inputs(self, normed: Tensor, bonus_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """What enters the LM head: ``(hidden [N, A, K-1, H], low)``; logits = hidden @ head^T (+ low @ W2^T + b2).

        ``low [N, A, K-1, r]`` is None unless the calibrator has the vocabulary form.
        """
        low = self.calibration(normed, bonus_ids)
        if low is None or self.config.calibrator == "vocabulary":
            return normed, low
        last, dtype = self.anchor_bias_mlp[2], self.target.dtype
        return normed + F.linear(low, last.weight.to(dtype), last.bias.to(dtype)), None

    def logits(self, context: BlockContext) -> Tensor:
        """Calibrated logits ``[N, A, K-1, V]`` of slots 1..K-1; -inf for tokens the drafter does not propose."""
        hidden, low = self.head_inputs(self(context), context.bonus_ids)
        logits = F.linear(hidden, self.target.head)
        if low is not None:
            last, dtype = self.anchor_bias_mlp[2], self.target.dtype
            logits = logits + F.linear(low, last.weight.to(dtype), last.bias.to(dtype))
        return only_listed(logits, self.draft_token_ids if self.config.draft_vocab_size is not None else None)
