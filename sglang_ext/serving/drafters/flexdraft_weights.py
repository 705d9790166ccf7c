"""FlexDraft's weights as the server holds them: second attention projections, mask embedding, calibrator.

Under ``--tp-size`` a rank holds its own heads of the projections and its own vocabulary rows of the calibrator.

Shape legend: N mask rows, B requests, K block size, H hidden, V vocabulary, r tokens that can be proposed, those of
this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_ext.models.flexdraft.checkpoint import Checkpoint
from sglang_ext.models.weights import DRAFT_TOKENS
from sglang_ext.serving.drafters.sharding import HeadShard, own_part
from sglang_ext.serving.drafters.vocabulary import VocabularyShard
from sglang_ext.serving.parallel import Ranks


class _Layer:
    """One deep layer's second projections; q, k and v are fused into one matrix as in the target."""

    def __init__(self, tensors: dict[str, Tensor], index: int, qk_norm: bool) -> None:
        prefix = f"layers.{index}.self_attn."
        self.qkv = torch.cat([tensors[f"{prefix}{name}_proj.weight"] for name in "qkv"]).contiguous()
        self.out = tensors[f"{prefix}o_proj.weight"].contiguous()
        self.q_norm = tensors[f"{prefix}q_norm.weight"] if qk_norm else None
        self.k_norm = tensors[f"{prefix}k_norm.weight"] if qk_norm else None


class FlexDraftWeights:
    """Loaded checkpoint, moved to the target's device and dtype.

    Args:
        checkpoint: a validated drafter checkpoint.
        dtype: the target's compute dtype.
        device: the target's device.
        norm_eps: epsilon of the target's RMS norms (used by q/k norms).
        ranks: the processes that share the target; each keeps its own heads.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device | str,
        norm_eps: float,
        ranks: Ranks | None = None,
    ) -> None:
        config = checkpoint.config
        self.ranks = Ranks() if ranks is None else ranks
        #: The heads of this rank.
        self.heads = HeadShard(
            self.ranks.rank, self.ranks.size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        listed = None
        if config.draft_vocab_size is not None:
            listed = checkpoint.tensors[DRAFT_TOKENS].to(device=device, dtype=torch.int64)
        tensors = {
            name: tensor.to(device=device, dtype=dtype)
            for name, tensor in own_part(checkpoint.tensors, self.heads).items()
            if name != DRAFT_TOKENS
        }
        #: ``[R]`` int64 ids of the tokens that can be proposed; None means all.
        self.draft_tokens = listed
        self._head: Tensor | None = None
        self.split = config.split
        self.mask_embedding = tensors["mask_embedding"].view(1, -1)
        self._layers = [_Layer(tensors, index, config.qk_norm) for index in range(config.num_layers)]
        self._norm_eps = norm_eps
        self._calibrator_form = config.calibrator
        if config.calibrator != "none":
            first = tensors["anchor_bias_mlp.0.weight"]
            self._bonus_in = first[:, : config.hidden_size].contiguous()
            self._hidden_in = first[:, config.hidden_size :].contiguous()
            self._bias_in = tensors["anchor_bias_mlp.0.bias"]
            self._weight_out = tensors["anchor_bias_mlp.2.weight"]
            self._bias_out = tensors["anchor_bias_mlp.2.bias"]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors held."""
        held = [self.mask_embedding]
        for layer in self._layers:
            held += [layer.qkv, layer.out]
            held += [norm for norm in (layer.q_norm, layer.k_norm) if norm is not None]
        if self._calibrator_form != "none":
            held += [self._bonus_in, self._hidden_in, self._bias_in, self._weight_out, self._bias_out]
        if self.draft_tokens is not None and self._head is not None:
            held += [self.draft_tokens, self._head]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def project(self, attention: Any, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q ``[N, heads, D]``, k and v ``[N, kv_heads, D]`` of mask rows ``[N, H]`` in one layer."""
        layer = self._layers[attention.attn.layer_id - self.split]
        head_dim = attention.attn.qk_head_dim
        q, k, v = F.linear(rows, layer.qkv).split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._head_norm(q, layer.q_norm, head_dim)
            k = self._head_norm(k, layer.k_norm, head_dim)
        q, k = attention.rotary_emb(positions, q, k)
        return (
            q.view(-1, attention.attn.tp_q_head_num, head_dim),
            k.view(-1, attention.attn.tp_k_head_num, head_dim),
            (v.reshape(-1, attention.attn.tp_v_head_num, head_dim)),
        )

    def output(self, layer_id: int, rows: Tensor) -> Tensor:
        """Apply the second output projection of one layer to attention outputs ``[N, heads * D]``."""
        return F.linear(rows, self._layers[layer_id - self.split].out)

    def share_head(self, head: Tensor, vocabulary: VocabularyShard) -> None:
        """Take the target's LM head as this rank holds it, once: as it is, or a copy of the rows of tokens that can be
        proposed; and keep those rows of the calibrator."""
        self._head = vocabulary.head(head)
        if self._calibrator_form == "vocabulary":
            self._weight_out, self._bias_out = vocabulary.rows(self._weight_out), vocabulary.rows(self._bias_out)

    def calibrated_logits(self, hidden: Tensor, bonus_embedding: Tensor) -> Tensor:
        """Return draft logits ``[B, K-1, r]`` over this rank's tokens that can be proposed (FlexDraft section 1).

        Args:
            hidden: ``[B, K-1, H]`` final-normed hidden states of slots 1..K-1.
            bonus_embedding: ``[B, H]`` the target's embedding of each bonus token.
        """
        assert self._head is not None
        head = self._head
        batch, slots, width = hidden.shape
        if self._calibrator_form == "none":
            return F.linear(hidden.reshape(-1, width), head).view(batch, slots, -1)
        inner = F.linear(hidden, self._hidden_in, self._bias_in) + F.linear(bonus_embedding, self._bonus_in)[:, None]
        bias = F.linear(F.silu(inner), self._weight_out, self._bias_out)
        if self._calibrator_form == "hidden":
            # 2-D and contiguous: a strided 3-D operand makes torch materialise the head per request.
            return F.linear((hidden + bias).reshape(-1, width), head).view(batch, slots, -1)
        return F.linear(hidden.reshape(-1, width), head).view(batch, slots, -1) + bias

    def _head_norm(self, rows: Tensor, weight: Tensor, head_dim: int) -> Tensor:
        heads = rows.reshape(rows.shape[0], -1, head_dim)
        return F.rms_norm(heads.float(), (head_dim,), weight.float(), self._norm_eps).to(rows.dtype).view(rows.shape)
