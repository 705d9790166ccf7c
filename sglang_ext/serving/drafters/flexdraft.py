"""The FlexDraft drafter: one block of drafts from the target's own deep layers (FlexDraft sections 1, 3 and 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_ext.core.block import BlockLayout
from sglang_ext.core.sampling import sample, target_probs
from sglang_ext.serving.attention.mask_rows import MaskAttention
from sglang_ext.serving.drafters.base import Context, DraftBlock, Drafter
from sglang_ext.serving.drafters.flexdraft_weights import FlexDraftWeights
from sglang_ext.serving.profile import StepProfile
from sglang_ext.serving.target_walk import TargetWalk
from sglang_ext.serving.verify_input import MaskRows


class FlexDraftDrafter(Drafter):
    """Drafts with the second projections, in the target pass (parallel) or in a short pass of its own (sequential).

    Args:
        model_runner: the host's target runner.
        weights: the loaded checkpoint.
        attention: attention of mask rows.
        block_size: K at run time, at most the trained one.
        top_m: stored width of the draft distribution under rejection sampling; ``None`` drafts greedily.
        profile: where the time of the drafter's head is charged.
    """

    can_join = True

    def __init__(
        self,
        model_runner: Any,
        weights: FlexDraftWeights,
        attention: MaskAttention,
        block_size: int,
        top_m: int | None,
        profile: StepProfile,
    ) -> None:
        self._profile = profile
        self._weights = weights
        self._attention = attention
        self._walk = TargetWalk(model_runner, weights, attention)
        self._embed = model_runner.model.model.embed_tokens
        # The host pads the head's rows; the calibrator knows the real vocabulary only.
        weights.share_head(model_runner.model.lm_head.weight[: model_runner.model_config.vocab_size])
        self._block = block_size
        self._top_m = top_m
        # Rows past the last trained position only ever follow a finished request; keep their rotary look-up in range.
        self._last_position = model_runner.model_config.context_len - 1

    @property
    def weight_bytes(self) -> int:
        """Bytes of the second projections, mask embedding and calibrator."""
        return self._weights.bytes

    def mask_rows(self, slots: Tensor, layout: BlockLayout, keys: int) -> MaskRows:
        """Lay out the mask groups of ``layout`` for requests in ``slots [B]``; ``keys`` bounds the pooled lengths."""
        meta = self._attention.prepare(slots, layout, keys)
        return MaskRows(positions=layout.mask_position_flat.clamp_max(self._last_position), meta=meta)

    def propose(self, context: Context) -> DraftBlock:
        """Run one group per request through the deep layers and draft from it."""
        layout = BlockLayout.sequential(context.lengths, self._block)
        hidden = self._walk.mask_pass(self.mask_rows(context.slots, layout, context.longest))
        return self.propose_joined(context, hidden.view(layout.batch, self._block, -1))

    def propose_joined(self, context: Context, mask_hidden: Tensor) -> DraftBlock:
        """Draft from the chosen group's final hidden states ``[B, K, H]``; slot 0 is the bonus token's own."""
        embedding = self._embed(context.bonus)
        with self._profile.section("draft head"):
            logits = self._weights.calibrated_logits(mask_hidden[:, 1:], embedding).float()
        top, best = logits.max(-1)
        tokens = self._token_ids(best)
        confidence = (top - logits.logsumexp(-1)).exp()
        # The drafter's numbers may overflow; a NaN must cost acceptance, never correctness.
        tokens = torch.where(confidence.isnan(), -1, tokens)
        if context.sampling is None or self._top_m is None:
            return DraftBlock(tokens, confidence.nan_to_num(0.0))
        return self._sampled(logits, confidence.nan_to_num(0.0), tokens, context)

    def _sampled(self, logits: Tensor, confidence: Tensor, greedy: Tensor, context: Context) -> DraftBlock:
        """Draw drafts from the truncated, request-shaped draft distribution and keep it for the acceptance test."""
        batch, slots, proposable = logits.shape
        assert context.sampling is not None and self._top_m is not None
        rows = context.sampling.rows(torch.arange(batch, device=logits.device).repeat_interleave(slots))
        probs = target_probs(logits.reshape(-1, proposable).nan_to_num(0.0), rows)
        q_probs, places = probs.topk(min(self._top_m, proposable), dim=-1)
        q_ids = self._token_ids(places)
        q_probs = q_probs / q_probs.sum(-1, keepdim=True)
        drawn = q_ids.gather(-1, sample(q_probs)[:, None]).view(batch, slots)
        tokens = torch.where(greedy < 0, greedy, drawn)
        shape = (batch, slots, q_ids.shape[-1])
        return DraftBlock(tokens, confidence, q_ids.view(shape), q_probs.view(shape))

    def _token_ids(self, places: Tensor) -> Tensor:
        """Turn places among the tokens that can be proposed into ids of the vocabulary."""
        listed = self._weights.draft_tokens
        return places if listed is None else listed[places]
