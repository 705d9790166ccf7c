"""The DFlare drafter (and DFlash, its special case): a small model of its own over taps of the target.

Context keys and values are made once per committed token, in the step that commits it, plain steps included: tokens
are shared through the prefix cache, so a token without them would spoil the drafts of every request that meets it
later, and its taps are gone once the step is over.

Shape legend: B requests, K block size, N rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_ext.core.block import BlockLayout
from sglang_ext.serving.attention.mask_rows import MaskAttention
from sglang_ext.serving.drafter_pool import DrafterPool
from sglang_ext.serving.drafters.base import Context, DraftBlock, LogitsDrafter
from sglang_ext.serving.drafters.dflare_weights import DFlareWeights
from sglang_ext.serving.drafters.proposal import propose_from_logits
from sglang_ext.serving.drafters.vocabulary import VocabularyShard
from sglang_ext.serving.profile import StepProfile
from sglang_ext.serving.taps import TapRecorder, Taps
from sglang_ext.serving.verify_input import MaskRows

PADDING_SLOT = 0
"""The pool slot that the host never gives to a token."""


def rejected_to_padding(taps: Taps, kept: Tensor) -> Taps:
    """Send the rows that are not ``kept [N]`` to a slot that nobody reads: how many there are stays unknown, so that
    nothing has to be read back from a GPU."""
    return taps._replace(slots=torch.where(kept, taps.slots, PADDING_SLOT))


class DFlareDrafter(LogitsDrafter):
    """Drafts one block per request in a pass of its own; never joins the target's.

    Args:
        model_runner: the host's target runner.
        weights: the loaded checkpoint.
        taps: where the target's states arrive.
        pool: the drafter's keys and values.
        attention: attention of block rows over ``pool``.
        mask_embedding: ``[H]`` what the K - 1 slots after the bonus token enter as.
        block_size: K at run time, at most the trained one.
        top_m: stored width of the draft distribution under rejection sampling; ``None`` drafts greedily.
        profile: where the time of the drafter's head is charged.
        drop_rejected: whether rows that were not accepted are left out of what is written; their number is then read
            from the device. Otherwise they go to a slot that nobody reads.
    """

    def __init__(
        self,
        model_runner: Any,
        weights: DFlareWeights,
        taps: TapRecorder,
        pool: DrafterPool,
        attention: MaskAttention,
        mask_embedding: Tensor,
        block_size: int,
        top_m: int | None,
        profile: StepProfile,
        drop_rejected: bool = True,
    ) -> None:
        self._drop_rejected = drop_rejected
        self._weights = weights
        self._taps = taps
        self._pool = pool
        self._attention = attention
        self._mask_embedding = mask_embedding
        self._block = block_size
        self._top_m = top_m
        self._profile = profile
        self._embed = model_runner.model.model.embed_tokens
        # The host may pad the head's rows.
        head, vocab_size = model_runner.model.lm_head.weight, model_runner.model_config.vocab_size
        self._vocabulary = VocabularyShard(weights.ranks, vocab_size, head.shape[0], weights.draft_tokens)
        self._head = self._vocabulary.head(head)
        # Rows past the last position only ever follow a finished request; keep their rotary look-up in range.
        self._last_position = model_runner.model_config.context_len - 1

    @property
    def weight_bytes(self) -> int:
        """Bytes of the drafter's layers, fusion and rotary tables."""
        own_head = 0 if self._vocabulary.listed is None else self._head.nbytes
        return self._weights.bytes + self._mask_embedding.nbytes + own_head

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of drafter keys and values per token."""
        return self._pool.bytes_per_token

    def allocate(self, slots: int) -> None:
        """Allocate the drafter's pool, slot by slot beside the target's."""
        self._pool.allocate(slots)

    def observe_prefill(self) -> None:
        """Write the context of the prompt tokens that were just read."""
        self._remember(self._taps.take())

    @property
    def attention(self) -> MaskAttention:
        """Attention of block rows over the drafter's own pool."""
        return self._attention

    def take_taps(self) -> Taps:
        """Return the taps of the pass that has just run."""
        return self._taps.take()

    def commit_taps(self, taps: Taps, layout: BlockLayout, accepted: Tensor) -> None:
        """Write the context of the tokens that were just committed: the old bonus token and the accepted drafts."""
        kept = layout.clean.column <= accepted[layout.clean.request]
        if self._drop_rejected:
            self._remember(taps if bool(kept.all()) else taps.rows(kept.nonzero().view(-1)))
        else:
            self._remember(rejected_to_padding(taps, kept))

    def _remember(self, taps: Taps) -> None:
        positions = taps.positions.clamp_max(self._last_position)
        self._pool.write(taps.slots, *self._weights.context(taps.states, positions))

    def propose(self, context: Context) -> DraftBlock:
        """Run one block per request through the drafter and draft from its slots 1..K-1."""
        return self.block(self.block_logits(context), context)

    def block(self, logits: Tensor, context: Context | None) -> DraftBlock:
        """See :meth:`LogitsDrafter.block`."""
        return propose_from_logits(logits, context, self._top_m, self._vocabulary)

    def block_logits(self, context: Context) -> Tensor:
        """Return float32 logits ``[B, K-1, r]`` of slots 1..K-1 over this rank's r tokens that can be proposed."""
        return self.logits_alone(context.bonus, self._planned(context))

    def block_hidden(self, context: Context) -> Tensor:
        """Return the final hidden states ``[B, K, H]`` of each request's block, slot 0 being the bonus token's own."""
        return self._hidden(context.bonus, self._planned(context))

    def _planned(self, context: Context) -> MaskRows:
        layout = context.block_layout(self._block)
        return self.place(layout, self._attention.prepare(context.slots, layout, context.longest))

    def place(self, layout: BlockLayout, meta: Any) -> MaskRows:
        """See :meth:`LogitsDrafter.place`."""
        return MaskRows(positions=layout.mask_position_flat.clamp_max(self._last_position), meta=meta)

    def logits_alone(self, bonus: Tensor, mask: MaskRows) -> Tensor:
        """See :meth:`LogitsDrafter.logits_alone`."""
        hidden = self._hidden(bonus, mask)
        with self._profile.section("draft head"):
            flat = F.linear(hidden[:, 1:].reshape(-1, hidden.shape[-1]), self._head)
            return flat.view(hidden.shape[0], self._block - 1, -1).float()

    def _hidden(self, bonus: Tensor, mask: MaskRows) -> Tensor:
        hidden = self._embedded(bonus)
        for index, layer in enumerate(self._weights.attention_layers):
            q, k, v = self._weights.project(index, hidden, mask.positions)
            hidden = self._weights.finish(index, hidden, self._attention.attend(layer, q, k, v, mask.meta))
        return self._weights.final_norm(hidden).view(bonus.shape[0], self._block, -1)

    def _embedded(self, bonus: Tensor) -> Tensor:
        """Return the block's input rows ``[B * K, H]``: the bonus token, then masks."""
        rows = self._mask_embedding.expand(bonus.shape[0], self._block, -1).clone()
        rows[:, 0] = self._embed(bonus)
        return rows.flatten(0, 1)
