"""The worker's memory between steps: the drafts waiting for verification, one row per request slot.

Rows are indexed by the host's request slots. A slot is always rewritten by the prefill of its next owner before it is
read, so nothing has to be cleared when a request ends, is aborted or is retracted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.serving.drafters.base import DraftBlock


class DraftState:
    """Tables of ``[slots, K-1]`` draft ids and confidences, and ``[slots, K-1, M]`` draft distributions if kept.

    Args:
        slots: request slots of the host.
        block_size: K.
        device: where the tables live.
        top_m: how many tokens of each draft distribution are kept, at most the vocabulary; ``None`` keeps none.
        vocab_size: V, the target's vocabulary.
    """

    def __init__(
        self, slots: int, block_size: int, device: torch.device | str, top_m: int | None, vocab_size: int
    ) -> None:
        width = block_size - 1
        self._last_id = vocab_size - 1
        self._tokens = torch.zeros((slots, width), dtype=torch.int64, device=device)
        self._confidence = torch.zeros((slots, width), dtype=torch.float32, device=device)
        self._q_ids: Tensor | None = None
        self._q_probs: Tensor | None = None
        if top_m is not None:
            top_m = min(top_m, vocab_size)
            self._q_ids = torch.zeros((slots, width, top_m), dtype=torch.int64, device=device)
            self._q_probs = torch.zeros((slots, width, top_m), dtype=torch.float32, device=device)

    @property
    def bytes(self) -> int:
        """Bytes held by the tables."""
        tables = (self._tokens, self._confidence, self._q_ids, self._q_probs)
        return sum(table.numel() * table.element_size() for table in tables if table is not None)

    def store(self, slots: Tensor, block: DraftBlock) -> None:
        """Keep ``block`` for the requests in ``slots [B]``."""
        self._tokens[slots] = block.tokens
        self._confidence[slots] = block.confidence
        if self._q_ids is not None and self._q_probs is not None:
            if block.q_ids is None or block.q_probs is None:
                # An argmax draft was drawn from a point mass; one outside the vocabulary is never looked up.
                self._q_ids[slots, :, 0] = block.tokens.clamp(0, self._last_id)
                self._q_probs[slots] = 0.0
                self._q_probs[slots, :, 0] = 1.0
            else:
                # A drafter that can propose fewer tokens than the table is wide leaves the rest without mass.
                proposed = block.q_ids.shape[-1]
                self._q_ids[slots, :, :proposed] = block.q_ids
                self._q_probs[slots] = 0.0
                self._q_probs[slots, :, :proposed] = block.q_probs

    def forget(self, slots: Tensor) -> None:
        """Mark the requests in ``slots [B]`` as having no drafts worth verifying."""
        self._confidence[slots] = 0.0

    def load(self, slots: Tensor) -> DraftBlock:
        """Return the drafts kept for ``slots [B]``."""
        return DraftBlock(
            tokens=self._tokens[slots],
            confidence=self._confidence[slots],
            q_ids=None if self._q_ids is None else self._q_ids[slots],
            q_probs=None if self._q_probs is None else self._q_probs[slots],
        )
