"""The FlexDraft drafter: one block of drafts from the target's own deep layers (FlexDraft sections 1, 3 and 4)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_ext.core.block import BlockLayout
from sglang_ext.serving.attention.mask_rows import MaskAttention
from sglang_ext.serving.drafters.base import Context, DraftBlock, Drafter
from sglang_ext.serving.drafters.flexdraft_weights import FlexDraftWeights
from sglang_ext.serving.drafters.proposal import propose_from_logits
from sglang_ext.serving.drafters.vocabulary import VocabularyShard
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
        head, vocab_size = model_runner.model.lm_head.weight, model_runner.model_config.vocab_size
        self._vocabulary = VocabularyShard(weights.ranks, vocab_size, head.shape[0], weights.draft_tokens)
        weights.share_head(head, self._vocabulary)
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
        layout = BlockLayout.sequential(context.lengths, self._block, context.host_lengths)
        hidden = self._walk.mask_pass(self.mask_rows(context.slots, layout, context.longest))
        return self.propose_joined(context, hidden.view(layout.batch, self._block, -1))

    def propose_joined(self, context: Context, mask_hidden: Tensor) -> DraftBlock:
        """Draft from the chosen group's final hidden states ``[B, K, H]``; slot 0 is the bonus token's own."""
        embedding = self._embed(context.bonus)
        with self._profile.section("draft head"):
            logits = self._weights.calibrated_logits(mask_hidden[:, 1:], embedding).float()
        return propose_from_logits(logits, context, self._top_m, self._vocabulary)
