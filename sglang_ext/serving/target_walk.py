"""The target's layers walked once, mask rows joining at the split layer (FlexDraft section 3).

The walk replaces ``model.forward`` on one model instance and calls the stock layers for everything that is the
target's own, so clean rows compute exactly what a stock verify pass computes. Mask rows share the target's norms and
feed-forward layers and bring their own attention projections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.layers.layer_boundary.residual.add_norm import PLAIN_ADD
from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor

from sglang_ext.serving.attention.mask_rows import MaskAttention
from sglang_ext.serving.drafters.flexdraft_weights import FlexDraftWeights
from sglang_ext.serving.verify_input import ChainVerifyInput, MaskRows


class _PassState:
    """The fields of a forward batch that the layer boundaries read, for a pass without clean rows.

    Under ``--tp-size`` they count ``input_ids``, one per row, to choose how sums over the ranks are done.
    """

    def __init__(self, row_per_id: Tensor) -> None:
        self.input_ids = row_per_id
        self.can_run_tbo = False
        self.residual_stream: Any = None
        self.forward_mode = ForwardMode.TARGET_VERIFY
        self.moe_num_token_non_padded = None


class TargetWalk:
    """Runs mask rows through the target's deep layers, beside clean rows or alone.

    Args:
        model_runner: the host's target runner, weights loaded.
        weights: the drafter's projections and mask embedding.
        attention: attention of mask rows over pooled and inline keys.
    """

    def __init__(self, model_runner: Any, weights: FlexDraftWeights, attention: MaskAttention) -> None:
        self._runner = model_runner
        self._model = model_runner.model
        self._layers = model_runner.model.model.layers
        self._norm = model_runner.model.model.norm
        self._weights = weights
        self._attention = attention
        self._stock_forward: Callable[..., Any] = self._model.forward
        self._model.forward = self._forward

    @torch.no_grad()
    def mask_pass(self, mask: MaskRows) -> Tensor:
        """Run mask rows alone through the deep layers (sequential mode); return final hidden states ``[N, H]``."""
        state = _PassState(mask.positions)
        residual_batch.start(state)
        hidden = self._weights.mask_embedding.expand(mask.positions.numel(), -1).contiguous()
        hidden, state.residual_stream = ResidualStream.from_handoff(hidden, torch.zeros_like(hidden), PLAIN_ADD)
        with forward_context(ForwardContext(attn_backend=self._runner.attn_backend)):
            return self._deep_layers(hidden, state, 0, None, mask)

    def _forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        verify = forward_batch.spec_info
        if not isinstance(verify, ChainVerifyInput) or verify.mask is None:
            return self._stock_forward(input_ids, positions, forward_batch, *args, **kwargs)
        mask = verify.mask
        hidden = self._model.model.embed_tokens(input_ids)
        residual_batch.start(forward_batch)
        for layer in self._layers[: self._weights.split]:
            hidden = layer(positions, hidden, forward_batch)
        hidden = self._append_mask_rows(hidden, forward_batch, mask.positions.numel())
        clean_rows = input_ids.shape[0]
        hidden = self._deep_layers(hidden, forward_batch, clean_rows, positions, mask)
        mask.hidden = hidden[clean_rows:]
        return self._model.logits_processor(input_ids, hidden[:clean_rows], self._model.lm_head, forward_batch)

    def _append_mask_rows(self, hidden: Any, forward_batch: Any, rows: int) -> Any:
        mask_hidden = self._weights.mask_embedding.expand(rows, -1)
        if self._weights.split == 0:
            # No layer has run: there is no separate residual yet, rows simply enter together.
            residual_batch.start(forward_batch)
            return torch.cat([hidden, mask_hidden])
        out, residual = residual_batch.stream_of(forward_batch).export(hidden)
        out = torch.cat([out, mask_hidden])
        residual = torch.cat([residual, residual.new_zeros(rows, residual.shape[1])])
        handle, forward_batch.residual_stream = ResidualStream.from_handoff(out, residual, PLAIN_ADD)
        return handle

    def _deep_layers(
        self, hidden: Any, state: Any, clean_rows: int, clean_positions: Tensor | None, mask: MaskRows
    ) -> Tensor:
        for layer in self._layers[self._weights.split :]:
            rows = layer.attn_boundary.prepare(hidden, state)
            mixed = []
            if clean_rows:
                # Clean rows go first: their keys and values must be in the cache before mask rows look at them.
                mixed.append(layer.self_attn(clean_positions, rows[:clean_rows], state))
            mixed.append(self._mask_attention(layer.self_attn, rows[clean_rows:], mask))
            hidden = layer.attn_boundary.finish(torch.cat(mixed), state)
            hidden = layer.ffn_boundary.prepare(hidden, state)
            hidden = layer.mlp(hidden, forward_batch=state)
            hidden = layer.ffn_boundary.finish(hidden, state)
        return residual_batch.final_norm(hidden, state, self._norm)

    def _mask_attention(self, attention: Any, rows: Tensor, mask: MaskRows) -> Tensor:
        q, k, v = self._weights.project(attention, rows, mask.positions)
        out = self._attention.attend(attention.attn, q, k, v, mask.meta)
        return self._weights.output(attention.attn.layer_id, out)
