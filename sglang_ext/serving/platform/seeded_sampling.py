"""Sampling keyed by a request's seed, with torch alone: the host's version needs a GPU kernel or its CPU wheel.

Shape legend: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLE_HOOK = "sglang.srt.layers.sampler.multinomial_with_seed"
BATCH_INVARIANT_HOOK = "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode"

_MASK = 0xFFFFFFFF


def multinomial_with_seed(logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """Draw one token per row from ``logprobs [N, V]``, keyed by ``seed [N]`` and ``positions [N]``; ``[N, 1]``.

    Gumbel-max with noise hashed from (seed, position, token), in float64, as the host draws on a GPU: the same request
    gives the same text there and here, whatever else is in the batch.
    """
    noise = hash32(seed.long(), positions.long(), torch.arange(logprobs.shape[1], device=logprobs.device))
    uniform = noise.double().div_(_MASK)
    # A uniform of 1 would give infinite noise: it is treated as the next smaller one.
    gumbel = -(-uniform.log_().clamp_(torch.finfo(torch.float64).min, -(2.0**-32))).log_()
    return gumbel.add_(logprobs.double()).argmax(dim=1, keepdim=True)


def hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Return MurmurHash3 (32 bit) of seed (8 bytes), position and column (4 bytes each): ``[N, V]`` int64."""
    state = torch.zeros_like(seed)
    for word in (seed, seed >> 32, positions):
        state = _mix(state, word & _MASK)
    state = _mix(state[:, None], columns[None, :]) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = ((state ^ (state >> shift)) * factor) & _MASK
    return state ^ (state >> 16)


def keep_torch_kernels(enable_bmm: bool = True) -> None:
    """Leave torch's kernels in place in deterministic mode (hook): the host's batch-invariant ones are for GPUs."""


def _mix(state: Tensor, word: Tensor) -> Tensor:
    word = _rotate((word * 0xCC9E2D51) & _MASK, 15)
    state = _rotate(state ^ ((word * 0x1B873593) & _MASK), 13)
    return (state * 5 + 0xE6546B64) & _MASK


def _rotate(word: Tensor, bits: int) -> Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _MASK
