"""The packed mask of a chain's pass in one launch; the torch twin is :func:`sglang_ext.core.mask_bits.pack`.

**The law is** :mod:`sglang_ext.core.masks`: *a query sees a clean key at or before its anchor, and a mask key of its
own group; nothing else.* A kernel cannot call it, so this one says it again, for chains, and its test compares every
bit of every small layout with the twin, which does call it. Whoever changes the law changes this kernel, or drops it.
Token trees, whose rows see ancestors instead of positions, stay with the twin.

Shape legend: B requests, Q query rows of a request, S keys of a request, K block size, T bytes of the packed mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_ext.core.block import BlockLayout
from sglang_ext.core.mask_bits import PackedMask, Rows, mask_lengths, packed_bytes
from sglang_ext.kernels.language import blocks, jit, launch, tl

BYTES = 256
"""Bytes of a request that one program packs, eight pairs each."""
LARGEST_NARROW = 2**31 - 1 - 8 * BYTES
"""Entries of a request that 32-bit numbers can count, with the last program's overhang."""


@dataclass(frozen=True, eq=False)
class MaskSizes:
    """What the host knows of a packed mask, sent to the device before the launch.

    Attributes:
        rows: which rows are the queries.
        query_lens, key_lens: Q and S per request.
        byte_ptr: B + 1 byte offsets.
        sent: ``[4, B+1]`` int32 on the device: byte offsets, Q, S, clean rows carried.
    """

    rows: Rows
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    byte_ptr: tuple[int, ...]
    sent: Tensor

    @classmethod
    def of(cls, layout: BlockLayout, rows: Rows) -> MaskSizes:
        """Take the sizes of a layout.

        Raises:
            ValueError: the layout is a token tree, its committed lengths are not known on the host, or the masks are
                too large.
        """
        if layout.parent is not None:
            raise ValueError("a token tree was given; the fused mask is for chains: use core.mask_bits.pack")
        query_lens, key_lens = mask_lengths(layout, rows)
        byte_ptr = packed_bytes(query_lens, key_lens)
        table = [byte_ptr, [*query_lens, 0], [*key_lens, 0], [*layout.clean.carried, 0]]
        sent = torch.tensor(table, dtype=torch.int32).to(layout.committed.device, non_blocking=True)
        return cls(rows, query_lens, key_lens, tuple(byte_ptr), sent)


@jit
def _pack(
    bits, sent, committed, clean_counts, group_counts, first_anchor, batch, block,
    CLEAN_ROWS: tl.constexpr, WIDE: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(1)
    line = sent + request
    start = tl.load(line)
    byte = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    mine = byte < tl.load(line + 1) - start
    queries = tl.load(line + batch + 1)
    keys = tl.maximum(tl.load(line + 2 * (batch + 1)), 1)
    carried = tl.load(line + 3 * (batch + 1))
    lane = tl.arange(0, 8)
    entry = byte[:, None] * 8 + lane[None, :]
    if WIDE:
        entry = byte.to(tl.int64)[:, None] * 8 + lane[None, :]
    query = (entry // keys).to(tl.int32)
    key = (entry % keys).to(tl.int32)
    cached = tl.load(committed + request).to(tl.int32)
    if CLEAN_ROWS:
        # Clean rows: the anchor is the row's own position; rows past the real ones see what the last real one does.
        last = tl.maximum(tl.load(clean_counts + request).to(tl.int32) - 1, 0)
        seen = key <= cached + tl.minimum(query, last)
    else:
        # Mask rows: group k is anchored k positions behind the first; a group that is not there has no clean keys.
        group = query // block
        real = group < tl.load(group_counts + request).to(tl.int32)
        anchor = tl.where(real, tl.load(first_anchor + request).to(tl.int32) + group, -1)
        mask_key = key - cached - carried
        seen = tl.where(mask_key < 0, key <= anchor, mask_key // block == group)
    seen = seen & (query < queries)
    value = tl.sum(tl.where(seen, 1, 0) << lane[None, :], axis=1)
    tl.store(bits + start + byte, value.to(tl.uint8), mask=mine)


def pack_fused(layout: BlockLayout, sizes: MaskSizes) -> PackedMask:
    """:func:`~sglang_ext.core.mask_bits.pack` of a chain in one launch.

    Args:
        layout: the pass, its per-request numbers on the device.
        sizes: from the same layout; they say which rows are the queries.
    """
    bits = torch.empty(sizes.byte_ptr[-1], dtype=torch.uint8, device=layout.committed.device)
    most = max((q * s for q, s in zip(sizes.query_lens, sizes.key_lens, strict=True)), default=0)
    launch(
        _pack, (blocks(blocks(most, 8), BYTES), layout.batch), bits, sizes.sent, layout.committed, layout.clean.counts,
        layout.groups.counts, layout.first_anchor, layout.batch, max(layout.block_size, 1),
        CLEAN_ROWS=sizes.rows is Rows.CLEAN, WIDE=most > LARGEST_NARROW, BYTES=BYTES,
    )  # fmt: skip
    return PackedMask(bits, sizes.sent[0], sizes.query_lens, sizes.key_lens)
