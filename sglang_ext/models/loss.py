"""The training loss: weighted cross-entropy over slots, without keeping full-vocabulary logits.

Shape legend: R rows (valid slots of blocks), H hidden, C candidate tokens, r calibrator rank, K block size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ROWS = 256


def slot_weights(block_size: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """``[K-1]`` weights exp(-(j-1)/gamma) of slots j = 1..K-1 (FlexDraft section 6, DFlare section 3)."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32, device=device) / gamma)


@dataclass(frozen=True)
class Candidates:
    """The tokens over which the softmax is normalised.

    ``ids [C]`` are token ids, ``correction [C]`` is added to their logits: 0 for tokens that are always present,
    log(pool / drawn) for tokens drawn at random to stand for a pool, which keeps the normaliser unbiased.
    """

    ids: Tensor
    correction: Tensor
    place: Tensor

    def index(self, labels: Tensor) -> Tensor:
        """Positions of ``labels`` among ``ids``; every label must be a candidate."""
        return self.place[labels]


def draw_candidates(frequent: Tensor, drawn: int, labels: Tensor, vocab_size: int, seed: int) -> Candidates:
    """Frequent tokens, the labels, and ``drawn`` random others; a pure function of its arguments.

    With ``drawn`` at least the number of remaining tokens the result is the whole vocabulary without correction.
    """
    device = labels.device
    fixed = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    fixed[frequent] = True
    fixed[labels] = True
    extra = fixed.clone()
    extra[frequent] = False
    pool = (~fixed).nonzero()[:, 0]
    certain = torch.cat((frequent, extra.nonzero()[:, 0]))
    if drawn >= len(pool):
        ids, correction = torch.cat((certain, pool)), torch.zeros(vocab_size, device=device)
    else:
        generator = torch.Generator().manual_seed(seed)
        chosen = pool[torch.randint(len(pool), (drawn,), generator=generator).to(device)]
        ids = torch.cat((certain, chosen))
        correction = torch.zeros(len(ids), device=device)
        correction[len(certain) :] = torch.log(torch.tensor(len(pool) / drawn))
    place = torch.full((vocab_size,), -1, dtype=torch.long, device=device)
    place[certain] = torch.arange(len(certain), device=device)
    if drawn >= len(pool):
        place[ids] = torch.arange(vocab_size, device=device)
    return Candidates(ids, correction, place)


class _CandidateCrossEntropy(torch.autograd.Function):
    """Loss and every gradient in one pass over chunks of rows; logits live for one chunk only."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        low: Tensor | None,
        low_weight: Tensor | None,
        bias: Tensor,
        labels: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_hidden = torch.empty_like(hidden)
        grad_low = None if low is None else torch.empty_like(low)
        grad_low_weight = None if low_weight is None else torch.zeros_like(low_weight, dtype=torch.float32)
        grad_bias = torch.zeros_like(bias)
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        correct = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        for start in range(0, len(hidden), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            logits = F.linear(hidden[rows], head)
            if low is not None and low_weight is not None:
                logits = logits + F.linear(low[rows], low_weight)
            scores = logits.float().add_(bias)
            picked = labels[rows, None]
            top, best = scores.max(-1, keepdim=True)
            own = scores.gather(1, picked)
            correct[rows] = (best == picked)[:, 0]
            scores.sub_(top).exp_()
            total = scores.sum(-1, keepdim=True)
            losses[rows] = (total.log() + top - own)[:, 0]
            scale = weights[rows, None]
            scores.mul_(scale / total)
            scores.scatter_add_(1, picked, -scale)
            grad = scores.to(hidden.dtype)
            torch.mm(grad, head, out=grad_hidden[rows])
            if low is not None and low_weight is not None and grad_low is not None and grad_low_weight is not None:
                torch.mm(grad, low_weight, out=grad_low[rows])
                grad_low_weight += grad.t() @ low[rows]
            if ctx.needs_input_grad[4]:
                grad_bias += scores.sum(0)
        ctx.gradients = (grad_hidden, grad_low, grad_low_weight, grad_bias)
        ctx.mark_non_differentiable(losses, correct)
        return (losses * weights).sum(), losses, correct

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, low, low_weight, bias = (
            None if part is None else part * scale.to(part.dtype) for part in ctx.gradients
        )
        ctx.gradients = None
        return hidden, None, low, low_weight, bias, None, None


def candidate_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor,
    labels: Tensor,
    weights: Tensor,
    low: Tensor | None = None,
    low_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted cross-entropy of ``hidden @ head^T (+ low @ low_weight^T) + bias``.

    Args:
        hidden: ``[R, H]``; gradient flows to it.
        head: ``[C, H]`` frozen rows of the LM head.
        bias: ``[C]`` fp32 added to the logits (candidate correction, and the calibrator's output bias).
        labels: ``[R]`` positions among the C candidates.
        weights: ``[R]`` weight of each row, already normalised.
        low, low_weight: ``[R, r]`` and ``[C, r]`` of a vocabulary-form calibrator; gradient flows to both.

    Returns:
        The scalar loss, the unweighted losses ``[R]`` and whether each row's best candidate is its label ``[R]``.
    """
    result: tuple[Tensor, Tensor, Tensor] = _CandidateCrossEntropy.apply(
        hidden, head, low, low_weight, bias, labels, weights
    )
    return result


def leading_matches(correct: Tensor, valid: Tensor) -> Tensor:
    """``[...]`` length of the leading run of correct slots of ``[..., K-1]``; a run ends where labels end."""
    return (correct & valid).long().cumprod(-1).sum(-1)
