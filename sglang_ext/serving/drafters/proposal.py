"""From a drafter's logits to a block of drafts: argmaxes, or draws from a truncated distribution.

Shape legend: B requests, K block size, R tokens that can be proposed, r those of them on this rank, M stored width of
a truncated distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.core.sampling import sample, target_probs
from sglang_ext.kernels.draft_choice import draft_choice
from sglang_ext.serving.drafters.base import Context, DraftBlock
from sglang_ext.serving.drafters.vocabulary import VocabularyShard


def propose_from_logits(
    logits: Tensor, context: Context | None, top_m: int | None, vocabulary: VocabularyShard
) -> DraftBlock:
    """Draft from this rank's ``logits [B, K-1, r]`` (float32); tokens and confidences are the same on every rank.

    Args:
        logits: of the slots after the bonus token.
        context: the requests; without sampling parameters drafts are argmaxes.
        top_m: M under rejection sampling, None to draft greedily.
        vocabulary: the tokens that can be proposed, as this rank holds them.
    """
    if vocabulary.ranks.size == 1:
        return block_from_logits(logits, context, top_m, vocabulary.listed)
    if context is not None and context.sampling is not None and top_m is not None:
        block = block_from_logits(vocabulary.gather(logits), context, top_m, vocabulary.listed)
        return block._replace(tokens=vocabulary.ranks.from_first(block.tokens))
    place, confidence = vocabulary.best(logits)
    return _argmax_block(place if vocabulary.listed is None else vocabulary.listed[place], confidence)


def block_from_logits(
    logits: Tensor, context: Context | None, top_m: int | None, listed: Tensor | None = None
) -> DraftBlock:
    """Draft from ``logits [B, K-1, R]`` (float32).

    Args:
        logits: of the slots after the bonus token.
        context: the requests; without it, or without sampling parameters, drafts are argmaxes.
        top_m: M under rejection sampling, None to draft greedily.
        listed: ``[R]`` int64 ids of the tokens that can be proposed; None means that places are ids.
    """
    tokens, confidence = draft_choice(logits, listed)
    if context is None or context.sampling is None or top_m is None:
        return DraftBlock(tokens, confidence)
    return _sampled(logits, confidence, tokens, context, top_m, listed)


def _argmax_block(tokens: Tensor, confidence: Tensor) -> DraftBlock:
    """The likeliest tokens ``[B, K-1]`` and their probabilities as drafts."""
    # The drafter's numbers may overflow; a NaN must cost acceptance, never correctness.
    return DraftBlock(torch.where(confidence.isnan(), -1, tokens), confidence.nan_to_num(0.0))


def _sampled(
    logits: Tensor, confidence: Tensor, greedy: Tensor, context: Context, top_m: int, listed: Tensor | None
) -> DraftBlock:
    """Draw drafts from the truncated, request-shaped draft distribution and keep it for the acceptance test."""
    batch, slots, proposable = logits.shape
    assert context.sampling is not None
    rows = context.sampling.rows(torch.arange(batch, device=logits.device).repeat_interleave(slots))
    probs = target_probs(logits.reshape(-1, proposable).nan_to_num(0.0), rows)
    q_probs, places = probs.topk(min(top_m, proposable), dim=-1)
    q_ids = places if listed is None else listed[places]
    q_probs = q_probs / q_probs.sum(-1, keepdim=True)
    drawn = q_ids.gather(-1, sample(q_probs)[:, None]).view(batch, slots)
    tokens = torch.where(greedy < 0, greedy, drawn)
    shape = (batch, slots, q_ids.shape[-1])
    return DraftBlock(tokens, confidence, q_ids.view(shape), q_probs.view(shape))
