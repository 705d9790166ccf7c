"""Drafts kept between steps: any drafter's block fits the table, and what comes back can be judged."""

from __future__ import annotations

import torch

from sglang_ext.core.accept import AcceptRule, accept
from sglang_ext.serving.draft_state import DraftState
from sglang_ext.serving.drafters.base import DraftBlock

VOCABULARY = 11
BLOCK = 4


def test_fewer_tokens_can_be_proposed_than_are_kept() -> None:
    """A short list of draft tokens, or a small vocabulary, leaves places of the table without mass, old ones too."""
    state = DraftState(3, BLOCK, "cpu", top_m=6, vocab_size=VOCABULARY)
    slots = torch.tensor([2, 0])
    for width in (6, 2):
        ids = torch.arange(width).expand(2, BLOCK - 1, width)
        probs = torch.full((2, BLOCK - 1, width), 1.0 / width)
        state.store(slots, DraftBlock(ids[..., 0], torch.ones(2, BLOCK - 1), ids, probs))
    kept = state.load(slots)
    assert kept.q_ids is not None and kept.q_probs is not None
    assert torch.equal(kept.q_ids[..., :2], ids) and torch.equal(kept.q_probs[..., :2], probs)
    assert kept.q_probs[..., 2:].sum() == 0


def test_no_more_is_kept_than_the_vocabulary() -> None:
    """A generous ``draft_top_m`` costs no more than the vocabulary does."""
    generous, all_of_it = (DraftState(3, BLOCK, "cpu", top_m, VOCABULARY) for top_m in (10**12, VOCABULARY))
    assert generous.bytes == all_of_it.bytes


def test_argmax_drafts_outside_the_vocabulary_are_rejected_under_rejection_sampling() -> None:
    """Ids that do not exist, negative or too large, are never accepted and never break the judging."""
    state = DraftState(1, BLOCK, "cpu", top_m=3, vocab_size=VOCABULARY)
    slots = torch.tensor([0])
    drafts = torch.tensor([[VOCABULARY + 5, -1, 3]])
    state.store(slots, DraftBlock(drafts, torch.ones(1, BLOCK - 1)))
    kept = state.load(slots)
    accepted = accept(
        AcceptRule.REJECTION,
        kept.tokens,
        torch.tensor([BLOCK - 1]),
        target_probs=torch.full((1, BLOCK, VOCABULARY), 1.0 / VOCABULARY),
        draft_probs=kept.q_probs,
        draft_support=kept.q_ids,
    )
    assert accepted.lengths.tolist() == [0]
    assert 0 <= int(accepted.bonus) < VOCABULARY
