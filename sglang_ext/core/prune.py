"""Selective verification: how many drafts of each request are worth a target row (FlexDraft section 4).

The confidence ``m_j`` of slot j is the largest probability (temperature 1) of its calibrated logits, and stands for
the probability that the target agrees with draft j given that it agreed with all before it.

Shape legend: B requests, K block size, so K - 1 drafts per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from sglang_ext.core.refusal import Refusal, nearest


class PruneStrategy(str, Enum):
    """CUMULATIVE_PRODUCT and MIN_CONFIDENCE are the paper's two strategies; NONE verifies every draft."""

    CUMULATIVE_PRODUCT = "cumulative_product"
    MIN_CONFIDENCE = "min_confidence"
    NONE = "none"


@dataclass(frozen=True)
class PruneConfig:
    """How the verify length is chosen.

    Attributes:
        strategy: a :class:`PruneStrategy` or its name.
        threshold: in ``[0, 1]``, the paper's 0.01 unless given; compared with the running product of confidences or
            with each confidence.
        min_drafts: verify at least this many drafts; 0 lets an unsure request take a plain step.
        max_drafts: verify at most this many; None for all K - 1.

    Raises:
        Refusal: on an unknown strategy or a value out of range.
    """

    strategy: PruneStrategy = PruneStrategy.CUMULATIVE_PRODUCT
    threshold: float = 0.01
    min_drafts: int = 1
    max_drafts: int | None = None

    def __post_init__(self) -> None:
        names = [strategy.value for strategy in PruneStrategy]
        if self.strategy not in names:
            raise Refusal(
                f"pruning strategy {self.strategy!r} is unknown{nearest(str(self.strategy), names)}",
                f"allowed are {', '.join(names)}",
                "set the pruning strategy to one of them",
            )
        object.__setattr__(self, "strategy", PruneStrategy(self.strategy))
        if not 0.0 <= self.threshold <= 1.0:
            raise Refusal(
                f"pruning threshold {self.threshold}",
                "a threshold is a probability from 0 to 1",
                "set the pruning threshold to a value such as 0.1",
            )
        if self.min_drafts < 0:
            raise Refusal(f"min_drafts={self.min_drafts}", "0 drafts or more are verified", "raise min_drafts to 0")
        if self.max_drafts is not None and self.max_drafts < self.min_drafts:
            raise Refusal(
                f"max_drafts={self.max_drafts} with min_drafts={self.min_drafts}",
                "max_drafts is at least min_drafts",
                "raise max_drafts or lower min_drafts",
            )


def verify_lengths(confidence: Tensor, config: PruneConfig) -> Tensor:
    """Return ``[B]`` int64: how many leading drafts of each request to verify.

    ``cumulative_product``: ``v = #{j : m_1 * ... * m_j >= threshold}``. ``min_confidence``: the leading run of
    ``m_j >= threshold``. ``none``: ``K - 1``. The result is clamped to ``[min_drafts, max_drafts]`` and never exceeds
    ``K - 1``. A NaN confidence ends the run.

    Args:
        confidence: ``[B, K-1]`` confidences ``m_1 .. m_{K-1}`` in ``[0, 1]``.
        config: the strategy and its bounds.
    """
    drafts = confidence.shape[-1]
    if config.strategy is PruneStrategy.NONE:
        length = torch.full(confidence.shape[:-1], drafts, dtype=torch.int64, device=confidence.device)
    elif config.strategy is PruneStrategy.MIN_CONFIDENCE:
        length = (confidence >= config.threshold).to(torch.int64).cumprod(-1).sum(-1)
    else:
        length = (confidence.cumprod(-1) >= config.threshold).sum(-1)
    most = drafts if config.max_drafts is None else min(config.max_drafts, drafts)
    return length.clamp(min(config.min_drafts, most), most)


def expected_accept(confidence: Tensor, length: Tensor) -> Tensor:
    """Return ``[B]``: tokens a step is expected to commit, bonus included, when ``length`` drafts are verified.

    ``1 + sum_{j <= v} m_1 * ... * m_j``.

    Args:
        confidence: ``[B, K-1]``.
        length: ``[B]`` verify lengths.
    """
    inside = torch.arange(confidence.shape[-1], device=confidence.device) < length.unsqueeze(-1)
    return 1 + torch.where(inside, confidence.cumprod(-1), 0.0).sum(-1)


def group_probability(confidence: Tensor, length: Tensor | None = None) -> Tensor:
    """Return ``[B, K]``: the probability that exactly k drafts are accepted, k = 0 .. K-1.

    ``m_1 ... m_k * (1 - m_{k+1})``; the last verified draft has no successor, so its term is the bare product. This is
    the probability that mask group k is the one whose drafts are used. Rows sum to 1.

    Args:
        confidence: ``[B, K-1]``.
        length: ``[B]`` verify lengths; drafts past it cannot be accepted. None verifies all.
    """
    if length is not None:
        inside = torch.arange(confidence.shape[-1], device=confidence.device) < length.unsqueeze(-1)
        confidence = torch.where(inside, confidence, 0.0)
    one = confidence.new_ones(confidence.shape[0], 1)
    reach = torch.cat([one, confidence.cumprod(-1)], dim=-1)
    stop = torch.cat([1 - confidence, one], dim=-1)
    return reach * stop
