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
from sglang_ext.serving.drafters.base import Context, DraftBlock, Drafter
from sglang_ext.serving.drafters.dflare_weights import DFlareWeights
from sglang_ext.serving.drafters.proposal import propose_from_logits
from sglang_ext.serving.drafters.vocabulary import VocabularyShard
from sglang_ext.serving.profile import StepProfile
from sglang_ext.serving.taps import TapRecorder, Taps

PADDING_SLOT = 0
"""The pool slot that the host never gives to a token."""


def rejected_to_padding(taps: Taps, kept: Tensor) -> Taps:
    """Send the rows that are not ``kept [N]`` to a slot that nobody reads: how many there are stays unknown, so that
    nothing has to be read back from a GPU."""
    return taps._replace(slots=torch.where(kept, taps.slots, PADDING_SLOT))


class DFlareDrafter(Drafter):
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
    ) -> None:
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

    def observe_commit(self, layout: BlockLayout, accepted: Tensor) -> None:
        """Write the context of the tokens that were just committed: the old bonus token and the accepted drafts."""
        taps = self._taps.take()
        kept = layout.clean.column <= accepted[layout.clean.request]
        if kept.device.type == "cpu":
            self._remember(taps if bool(kept.all()) else taps.rows(kept.nonzero().view(-1)))
        else:
            self._remember(rejected_to_padding(taps, kept))

    def _remember(self, taps: Taps) -> None:
        positions = taps.positions.clamp_max(self._last_position)
        self._pool.write(taps.slots, *self._weights.context(taps.states, positions))

    def propose(self, context: Context) -> DraftBlock:
        """Run one block per request through the drafter and draft from its slots 1..K-1."""
        return propose_from_logits(self.block_logits(context), context, self._top_m, self._vocabulary)

    def block_logits(self, context: Context) -> Tensor:
        """Return float32 logits ``[B, K-1, r]`` of slots 1..K-1 over this rank's r tokens that can be proposed."""
        hidden = self.block_hidden(context)
        with self._profile.section("draft head"):
            flat = F.linear(hidden[:, 1:].reshape(-1, hidden.shape[-1]), self._head)
            return flat.view(hidden.shape[0], self._block - 1, -1).float()

    def block_hidden(self, context: Context) -> Tensor:
        """Return the final hidden states ``[B, K, H]`` of each request's block, slot 0 being the bonus token's own."""
        layout = BlockLayout.sequential(context.lengths, self._block, context.host_lengths)
        meta = self._attention.prepare(context.slots, layout, context.longest)
        positions = layout.mask_position_flat.clamp_max(self._last_position)
        hidden = self._embedded(context.bonus)
        for index, layer in enumerate(self._weights.attention_layers):
            q, k, v = self._weights.project(index, hidden, positions)
            hidden = self._weights.finish(index, hidden, self._attention.attend(layer, q, k, v, meta))
        return self._weights.final_norm(hidden).view(layout.batch, self._block, -1)

    def _embedded(self, bonus: Tensor) -> Tensor:
        """Return the block's input rows ``[B * K, H]``: the bonus token, then masks."""
        rows = self._mask_embedding.expand(bonus.shape[0], self._block, -1).clone()
        rows[:, 0] = self._embed(bonus)
        return rows.flatten(0, 1)
