"""The FlexDraft drafter: one block of drafts from the target's own deep layers (FlexDraft sections 1, 3 and 4)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_ext.core.block import BlockLayout
from sglang_ext.serving.attention.mask_rows import MaskAttention
from sglang_ext.serving.drafters.base import Context, DraftBlock, LogitsDrafter
from sglang_ext.serving.drafters.flexdraft_weights import FlexDraftWeights
from sglang_ext.serving.drafters.proposal import propose_from_logits
from sglang_ext.serving.drafters.vocabulary import VocabularyShard
from sglang_ext.serving.profile import StepProfile
from sglang_ext.serving.target_walk import TargetWalk
from sglang_ext.serving.verify_input import MaskRows


class FlexDraftDrafter(LogitsDrafter):
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

    @property
    def attention(self) -> MaskAttention:
        """Attention of mask rows over the target's own pool."""
        return self._attention

    def mask_rows(self, slots: Tensor, layout: BlockLayout, keys: int) -> MaskRows:
        """Lay out the mask groups of ``layout`` for requests in ``slots [B]``; ``keys`` bounds the pooled lengths."""
        return self.place(layout, self._attention.prepare(slots, layout, keys))

    def place(self, layout: BlockLayout, meta: Any) -> MaskRows:
        """See :meth:`LogitsDrafter.place`."""
        return MaskRows(positions=layout.mask_position_flat.clamp_max(self._last_position), meta=meta)

    def propose(self, context: Context) -> DraftBlock:
        """Run one group per request through the deep layers and draft from it."""
        mask = self.mask_rows(context.slots, context.block_layout(self._block), context.longest)
        return self.block(self.logits_alone(context.bonus, mask), context)

    def propose_joined(self, context: Context, mask_hidden: Tensor) -> DraftBlock:
        """Draft from the chosen group's final hidden states ``[B, K, H]``; slot 0 is the bonus token's own."""
        return self.block(self.logits_joined(context.bonus, mask_hidden), context)

    def logits_alone(self, bonus: Tensor, mask: MaskRows) -> Tensor:
        """See :meth:`LogitsDrafter.logits_alone`."""
        return self.logits_joined(bonus, self._walk.mask_pass(mask).view(bonus.shape[0], self._block, -1))

    def logits_joined(self, bonus: Tensor, mask_hidden: Tensor) -> Tensor:
        """See :meth:`LogitsDrafter.logits_joined`."""
        embedding = self._embed(bonus)
        with self._profile.section("draft head"):
            return self._weights.calibrated_logits(mask_hidden[:, 1:], embedding).float()

    def block(self, logits: Tensor, context: Context | None) -> DraftBlock:
        """See :meth:`LogitsDrafter.block`."""
        return propose_from_logits(logits, context, self._top_m, self._vocabulary)
