"""From draft logits to greedy drafts with confidences, reading the vocabulary once.

Shape legend: B requests, K block size, R tokens that can be proposed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.kernels.language import jit, launch, power_of_two, tl

BLOCK = 4096
"""Logits that a program reads at once."""
WARPS = 8
"""Of a program: at most sixteen numbers of each kind per thread."""


def draft_choice(logits: Tensor, listed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return tokens ``[B, K-1]`` int64 and their probabilities ``[B, K-1]`` float32.

    A row whose numbers have overflowed gets token -1 and confidence 0, which costs acceptance and nothing else.

    Args:
        logits: ``[B, K-1, R]`` float32.
        listed: ``[R]`` int64 ids of the tokens that can be proposed; None means that places are ids.
    """
    top, best = logits.max(-1)
    tokens = best if listed is None else listed[best]
    confidence = (top - logits.logsumexp(-1)).exp()
    tokens = torch.where(confidence.isnan(), -1, tokens)
    return tokens, confidence.nan_to_num(0.0)


@jit
def _choose(
    logits, listed, tokens, confidence, stride, COUNT: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, COUNT, BLOCK):
        at = start + lane
        value = tl.load(line + at, mask=at < COUNT, other=float("-inf")).to(tl.float32)
        # NaN and +inf have no softmax: the row is broken. What is left compares and adds as numbers do.
        wrong = (value != value) | (value == float("inf"))
        broken = broken | wrong.to(tl.int32)
        value = tl.where(wrong, float("-inf"), value)
        higher = value > top
        place = tl.where(higher, at, place)
        peak = tl.where(higher, value, top)
        level = tl.where(peak == float("-inf"), 0.0, peak)
        total = total * tl.exp(top - level) + tl.exp(value - level)
        top = peak
    peak = tl.max(top, axis=0)
    level = tl.where(peak == float("-inf"), 0.0, peak)
    mass = tl.sum(total * tl.exp(top - level), axis=0)
    best = tl.min(tl.where(top == peak, place, COUNT), axis=0)
    lost = (tl.max(broken, axis=0) > 0) | (peak == float("-inf"))
    token = best.to(tl.int64)
    if LISTED:
        token = tl.load(listed + tl.where(lost, 0, best))
    tl.store(tokens + row, tl.where(lost, -1, token))
    tl.store(confidence + row, tl.where(lost, 0.0, 1.0 / tl.where(lost, 1.0, mass)))


def draft_choice_fused(logits: Tensor, listed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """:func:`draft_choice` in one launch that reads every logit once."""
    flat = logits.reshape(-1, logits.shape[-1])
    tokens = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    confidence = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    count = flat.shape[1]
    # A constant, as a drafter has one vocabulary: Triton 3.6 interprets no loop over a number it is passed (NumPy 2.5).
    launch(
        _choose, (flat.shape[0],), flat, listed, tokens, confidence, flat.stride(0),
        COUNT=count, LISTED=listed is not None, BLOCK=min(BLOCK, power_of_two(count)), num_warps=WARPS,
    )  # fmt: skip
    return tokens, confidence
