"""From logits to the distribution the host samples from, and one draw from it.

Shape legend: R rows, V vocabulary. A row is one position of one request; :meth:`SamplingParams.rows` repeats a
request's parameters over its rows. Nothing here reads a CUDA tensor back to the host; whether a filter is needed at
all is decided from plain Python flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Columns looked at before a full sort is paid for (CPU): a nucleus wider than this is rare, and sorting 49k columns
# costs ten times as much as finding the largest thousand.
_HEAD = 1024


@dataclass(frozen=True, eq=False)
class SamplingParams:
    """Sampling parameters, one row each, with the host-side facts that allow short cuts.

    Attributes:
        temperature: ``[R]`` float; 0 (or below) makes the row greedy.
        top_k: ``[R]`` int; 1 makes the row greedy, ``<= 0`` or ``>= V`` switches the filter off.
        top_p: ``[R]`` float; 1 keeps everything.
        min_p: ``[R]`` float; 0 switches the filter off.
        any_greedy, any_top_k, any_top_p, any_min_p: False promises that no row needs that treatment. True is always
            correct, only slower.
        max_top_k: an upper bound on every row's active ``top_k``, or None if some row keeps the whole vocabulary. With
            it only that many columns are sorted.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    any_greedy: bool = True
    any_top_k: bool = True
    any_top_p: bool = True
    any_min_p: bool = True
    max_top_k: int | None = None

    @classmethod
    def from_lists(
        cls,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        device: torch.device | str = "cpu",
    ) -> SamplingParams:
        """Build from Python numbers, one per row, and derive every short cut from them."""
        # A greedy row needs no filter: it becomes one-hot whatever the filters leave.
        bounds = [1 if t <= 0 else k for t, k in zip(temperature, top_k, strict=True)]
        return cls(
            temperature=torch.tensor(temperature, dtype=torch.float32, device=device),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            top_p=torch.tensor(top_p, dtype=torch.float32, device=device),
            min_p=torch.tensor(min_p, dtype=torch.float32, device=device),
            any_greedy=1 in bounds,
            any_top_k=any(k > 1 for k in bounds),
            any_top_p=any(p < 1 for p in top_p),
            any_min_p=any(p > 0 for p in min_p),
            max_top_k=max(bounds) if bounds and min(bounds) > 0 else None,
        )

    @property
    def is_greedy(self) -> Tensor:
        """``[R]`` bool: rows whose distribution is the first argmax."""
        return (self.temperature <= 0) | (self.top_k == 1)

    def rows(self, request: Tensor) -> SamplingParams:
        """Return the parameters of ``[N]`` rows, where row i belongs to request ``request[i]``."""
        return replace(
            self,
            temperature=self.temperature[request],
            top_k=self.top_k[request],
            top_p=self.top_p[request],
            min_p=self.min_p[request],
        )


def target_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the ``[R, V]`` float32 distribution SGLang's PyTorch sampler draws from, normalised.

    Order and strictness are the host's: ``softmax(logits / temperature)``; sort descending; drop ranks ``>= top_k``;
    drop tokens whose preceding cumulative mass (of the unfiltered distribution) exceeds ``top_p``; drop tokens below
    ``min_p`` times the largest probability; renormalise. Greedy rows become one-hot at their first argmax. A row's
    result does not depend on the other rows (in the host, a row without top-p beside one with it may lose the tail
    that lies below float32 rounding).

    Args:
        logits: ``[R, V]``, after penalties, bias and grammar; not modified.
        params: ``[R]`` rows.
    """
    logits = logits.float()
    temperature = torch.where(params.temperature > 0, params.temperature, 1.0).unsqueeze(-1)
    probs = torch.softmax(logits / temperature, dim=-1)
    if params.any_top_k or params.any_top_p or params.any_min_p:
        probs = _filtered(probs, params)
    if params.any_greedy:
        one_hot = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        probs = torch.where(params.is_greedy.unsqueeze(-1), one_hot, probs)
    return probs


def _filtered(probs: Tensor, params: SamplingParams) -> Tensor:
    """Apply top-k, top-p and min-p to ``[R, V]`` probabilities in the host's order, and renormalise."""
    vocabulary = probs.shape[-1]
    head = _HEAD if params.max_top_k is None else params.max_top_k
    exact = params.max_top_k is not None
    if head < vocabulary and (exact or probs.device.type == "cpu"):
        ranked, token = torch.topk(probs, head, dim=-1, sorted=True)
        drop = _dropped(ranked, params, vocabulary)
        # Every filter drops a tail of the ranking, so once the last column of the head is dropped nothing after it
        # survives. The look at the tensor is free on the CPU, where it is the only place it happens.
        if exact or bool((drop[:, -1] | params.is_greedy).all()):
            return _renormalised(probs, ranked, token, drop)
    ranked, token = torch.sort(probs, dim=-1, descending=True, stable=True)
    return _renormalised(probs, ranked, token, _dropped(ranked, params, vocabulary))


def _dropped(ranked: Tensor, params: SamplingParams, vocabulary: int) -> Tensor:
    """``[R, C]`` bool: which of the C leading ranks the filters drop."""
    drop = torch.zeros_like(ranked, dtype=torch.bool)
    if params.any_top_k:
        limit = torch.where(params.top_k > 0, params.top_k, vocabulary).unsqueeze(-1)
        drop |= torch.arange(ranked.shape[-1], device=ranked.device) >= limit
    if params.any_top_p:
        # Rounding can push the running sum past 1; a row that asked for everything keeps everything, whatever the
        # other rows of its batch ask for.
        top_p = torch.where(params.top_p < 1, params.top_p, torch.inf).unsqueeze(-1)
        drop |= (ranked.cumsum(-1) - ranked) > top_p
    if params.any_min_p:
        drop |= ranked < ranked[:, :1] * params.min_p.unsqueeze(-1)
    return drop


def _renormalised(probs: Tensor, ranked: Tensor, token: Tensor, drop: Tensor) -> Tensor:
    """``[R, V]``: the kept ranks at their tokens, summing to 1."""
    kept = ranked.masked_fill(drop, 0.0)
    return torch.zeros_like(probs).scatter_(-1, token, kept / kept.sum(-1, keepdim=True))


def sample(probs: Tensor, generator: torch.Generator | None = None, *, uniform: Tensor | None = None) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution; a token without mass is never drawn.

    Args:
        probs: ``[..., V]`` non-negative weights; each row is normalised by its own sum and must have some mass.
        generator: source of the draws when ``uniform`` is not given, on the device of ``probs``.
        uniform: ``[...]`` draws in ``[0, 1)``, for callers that key them by seed and position.

    Returns:
        ``[...]`` int64 token ids.
    """
    if uniform is None:
        uniform = torch.rand(probs.shape[:-1], dtype=torch.float64, device=probs.device, generator=generator)
    # Float64 keeps the quantile of a 150k-token row honest. A parallel prefix sum need not be monotone in its last
    # bits, hence the explicit mask: the row maximum always belongs to a token that has mass.
    cumulative = torch.where(probs > 0, probs.cumsum(-1, dtype=torch.float64), -1.0)
    threshold = uniform.to(torch.float64).unsqueeze(-1) * cumulative.amax(-1, keepdim=True)
    return (cumulative > threshold).to(torch.uint8).argmax(-1)
