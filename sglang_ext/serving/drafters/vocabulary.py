"""The vocabulary as one rank's LM head holds it, and choices over all of it without gathering its logits.

Shape legend: V vocabulary, R tokens that can be proposed, r those of them whose rows lie on this rank, P ranks, H
hidden, B requests, K block size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_ext.serving.parallel import Ranks


class VocabularyShard:
    """This rank's part of the tokens that can be proposed.

    Args:
        ranks: the processes that share the head.
        vocab_size: V.
        head_rows: rows of the head on each rank, padding included; rank i starts at id ``i * head_rows``.
        listed: ``[R]`` int64 increasing ids of the tokens that can be proposed; None means that places are ids.
    """

    def __init__(self, ranks: Ranks, vocab_size: int, head_rows: int, listed: Tensor | None = None) -> None:
        self.ranks = ranks
        self.listed = listed
        starts = torch.tensor([min(rank * head_rows, vocab_size) for rank in range(ranks.size)] + [vocab_size])
        self._first_id, self._last_id = int(starts[ranks.rank]), int(starts[ranks.rank + 1])
        bounds = starts if listed is None else torch.searchsorted(listed.cpu(), starts)
        #: Rank i has the places ``bounds[i]`` to ``bounds[i + 1] - 1`` among the R.
        self._bounds: list[int] = bounds.tolist()

    @property
    def proposable(self) -> int:
        """R."""
        return self._bounds[-1]

    @property
    def _own(self) -> slice:
        return slice(self._bounds[self.ranks.rank], self._bounds[self.ranks.rank + 1])

    def head(self, weight: Tensor) -> Tensor:
        """Return the rows ``[r, H]`` of this rank's head ``weight [head_rows, H]``; a view where none is left out."""
        if self.listed is None:
            return weight[: self._last_id - self._first_id]
        return weight[self.listed[self._own] - self._first_id].contiguous()

    def rows(self, weight: Tensor) -> Tensor:
        """Return the rows ``[r, ...]`` of a ``weight [V, ...]`` that is whole on every rank."""
        if self.listed is not None:
            return weight[self.listed[self._own]]
        return weight if self.ranks.size == 1 else weight[self._own].clone()

    def gather(self, logits: Tensor) -> Tensor:
        """Return logits ``[..., R]`` over all tokens from every rank's ``[..., r]``."""
        counts = [stop - start for start, stop in zip(self._bounds, self._bounds[1:], strict=False)]
        padded = F.pad(logits, (0, max(counts) - logits.shape[-1]), value=float("-inf"))
        parts = self.ranks.gather(padded)
        return torch.cat([part[..., :count] for part, count in zip(parts, counts, strict=True)], dim=-1)

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest token and its probability, ``[...]`` each, the same on every rank.

        Three numbers per row travel: each rank's largest logit, where it is, and the log of the sum of exponentials.
        The lowest place wins a tie, as in an argmax over the whole.

        Args:
            logits: ``[..., r]`` float32 of this rank.

        Returns:
            place int64 among the R, and probability float32, NaN where the logits hold one.
        """
        if not logits.shape[-1]:
            logits = logits.new_full((*logits.shape[:-1], 1), float("-inf"))
        top, place = logits.max(-1)
        mine = torch.stack([top.double(), place.double() + self._own.start, logits.logsumexp(-1).double()])
        tops, places, sums = self.ranks.gather(mine).unbind(1)
        best = tops.amax(0)
        # A NaN is nobody's largest; its place means nothing and need only exist.
        place = torch.where(tops == best, places, self.proposable - 1).amin(0)
        return place.to(torch.int64), (best - sums.logsumexp(0)).exp().float()
