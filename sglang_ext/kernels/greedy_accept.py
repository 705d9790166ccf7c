"""Greedy acceptance in one launch; what it must give is :func:`sglang_ext.core.accept.accept`'s to say.

Shape legend: B requests, W clean rows of the widest request (so W - 1 drafts), N flat clean rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.core.accept import Accepted, AcceptRule, accept
from sglang_ext.core.block import RowMap
from sglang_ext.kernels.language import jit, launch, power_of_two, tl


def greedy_accept(choices: Tensor, clean: RowMap, drafts: Tensor, valid: Tensor, pad: int = 0) -> Accepted:
    """Accept drafts while they are the target's choice; the bonus is its choice where the run ends.

    Args:
        choices: ``[N]`` int64, the target's first argmax of every flat clean row.
        clean: index maps of the clean rows; every request has at least one.
        drafts: ``[B, W-1]`` int64.
        valid: ``[B]`` int, drafts to verify; below the request's row count.
        pad: token written after the bonus.
    """
    return accept(AcceptRule.GREEDY, drafts, valid, target_choice=clean.pad(choices), pad=pad)


@jit
def _accept(
    choices, ptr, drafts, valid, lengths, bonus, tokens, stride, width, pad, COLUMNS: tl.constexpr
):  # fmt: skip
    request = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    row = choices + tl.load(ptr + request)
    judged = column < tl.minimum(tl.load(valid + request), width - 1)
    draft = tl.load(drafts + request * stride + column, mask=judged, other=-1)
    choice = tl.load(row + column, mask=judged, other=-1)
    agrees = judged & (draft >= 0) & (draft == choice)
    length = tl.min(tl.where(agrees, COLUMNS, column), axis=0)
    following = tl.load(row + length)
    tl.store(lengths + request, length)
    tl.store(bonus + request, following)
    token = tl.where(column < length, draft, tl.where(column == length, following, pad))
    tl.store(tokens + request * width + column, token, mask=column < width)


def greedy_accept_fused(choices: Tensor, clean: RowMap, drafts: Tensor, valid: Tensor, pad: int = 0) -> Accepted:
    """:func:`greedy_accept` in one launch."""
    batch, width = drafts.shape[0], drafts.shape[1] + 1
    lengths, bonus = (torch.empty(batch, dtype=torch.int64, device=drafts.device) for _ in range(2))
    tokens = torch.empty((batch, width), dtype=torch.int64, device=drafts.device)
    launch(
        _accept, (batch,), choices, clean.ptr, drafts, valid, lengths, bonus, tokens, drafts.stride(0), width, pad,
        COLUMNS=power_of_two(width),
    )  # fmt: skip
    return Accepted(lengths, bonus, tokens)
