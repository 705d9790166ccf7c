"""Ways to compute a parallel pass that are the same arithmetic, in float64: what the GPU forms rest on.

One call under a mask, a call per group without one, and a prefix call merged with a small masked one agree to rounding.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_ext.core.block import BlockLayout
from sglang_ext.core.mask_bits import PackedMask, Rows, pack

LAWS = settings(max_examples=60, deadline=None, print_blob=True)
HEADS, SHARED, SIZE = 6, 3, 8
EXACT = {"atol": 1e-10, "rtol": 1e-10}

Numbers = tuple[Tensor, Tensor, Tensor]


@st.composite
def passes(draw):
    batch, block = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    committed = [draw(st.integers(1, 50)) for _ in range(batch)]
    widths = [draw(st.integers(0, 6)) for _ in range(batch)]
    groups = [draw(st.integers(0, max(width, 1))) for width in widths]
    return committed, widths, groups, block


def unpacked(mask: PackedMask) -> list[Tensor]:
    """Read bits as a kernel does."""
    found = []
    for start, queries, keys in zip(mask.byte_ptr.tolist(), mask.query_lens, mask.key_lens):
        size = queries * keys
        bits = np.unpackbits(mask.bits.numpy()[start : start + (size + 7) // 8], bitorder="little")[:size]
        found.append(torch.from_numpy(bits.astype(bool)).view(queries, keys))
    return found


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return outputs ``[Q, H, D]`` and natural LSE ``[Q, H]``; no keys give zeros and -inf."""
    k, v = (part.repeat_interleave(HEADS // SHARED, 1) for part in (k, v))
    scores = torch.einsum("qhd,shd->qhs", q, k) / math.sqrt(SIZE)
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse.isinf()[..., None], 0.0, (scores - lse[..., None]).exp())
    return torch.einsum("qhs,shd->qhd", weights, v), lse


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    top = torch.maximum(first[1], second[1])
    weights = [(lse - top).exp()[..., None] for _, lse in (first, second)]
    return (first[0] * weights[0] + second[0] * weights[1]) / (weights[0] + weights[1])


def numbers(layout: BlockLayout, seed: int) -> list[Numbers]:
    """Queries of each request's mask rows, keys and values of everything: committed, clean rows, mask rows."""
    random = torch.Generator().manual_seed(seed)
    drawn = []
    for committed, width, own in zip(layout.host_committed, layout.clean.carried, layout.mask.carried, strict=True):
        keys = committed + width + own
        q = torch.randn(own, HEADS, SIZE, generator=random, dtype=torch.float64)
        k, v = (torch.randn(keys, SHARED, SIZE, generator=random, dtype=torch.float64) for _ in range(2))
        drawn.append((q, k, v))
    return drawn


@LAWS
@given(spec=passes(), seed=st.integers(0, 999))
def test_one_call_groups_alone_and_prefix_with_tail_are_one_arithmetic(spec, seed) -> None:
    committed, widths, groups, block = spec
    layout = BlockLayout.ragged(committed, widths, groups, block)
    whole = unpacked(pack(layout, Rows.MASK))
    tail = unpacked(pack(layout.without_cache(), Rows.MASK))
    for i, (q, k, v) in enumerate(numbers(layout, seed)):
        length, width = committed[i], widths[i]
        under_mask, _ = attend(q, k, v, whole[i])
        apart = merge(attend(q, k[:length], v[:length]), attend(q, k[length:], v[length:], tail[i]))
        torch.testing.assert_close(apart, under_mask, **EXACT)
        for group in range(groups[i]):
            # What group k sees is a prefix and its own rows: no mask is needed.
            rows = slice(group * block, (group + 1) * block)
            own = torch.arange(rows.start, rows.stop) + length + width
            keys = torch.cat([torch.arange(length + (group + 1 if width else 0)), own])
            alone, _ = attend(q[rows], k[keys], v[keys])
            torch.testing.assert_close(alone, under_mask[rows], **EXACT)


@LAWS
@given(spec=passes(), window=st.integers(0, 40))
def test_a_wider_window_over_row_numbers_keeps_every_pair_a_window_over_positions_allows(spec, window) -> None:
    """Kernels take a query's place in the call for its position. For groups that is too far right: a kernel's own
    window would hide keys, unless it is widened by the largest such shift. Why windows are never left to a kernel."""
    committed, widths, groups, block = spec
    layout = BlockLayout.ragged(committed, widths, groups, block)
    for i, mask in enumerate(unpacked(pack(layout, Rows.MASK))):
        length, width, own = committed[i], widths[i], groups[i] * block
        if not own:
            continue
        rows, keys = width + own, length + width + own
        mask_positions = layout.mask_positions[i, :own]
        key_position = torch.cat([torch.arange(length + width), mask_positions])
        row = torch.arange(width, rows)
        shift = int((row - (mask_positions - length)).max())
        allowed = mask & (key_position >= (mask_positions - window)[:, None])

        def kept(left: int, row=row, rows=rows, keys=keys) -> Tensor:
            return torch.arange(keys) + rows + left >= (keys + row)[:, None]

        assert not (allowed & ~kept(window + max(shift, 0))).any()


def test_a_kernels_own_window_would_hide_keys_from_groups() -> None:
    """The same in one example: group 3 of four, window 4, and the committed token just before its anchor is gone."""
    length, width, block, window = 10, 4, 4, 4
    row, position = width + 3 * block, length + 4
    key = position - window
    assert key + (width + 4 * block) + window < (length + width + 4 * block) + row
