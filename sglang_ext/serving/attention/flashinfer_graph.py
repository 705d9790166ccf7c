"""Attention inside captured passes, in the ``merged`` form: buffers that stay, plans made before every replay.

A captured pass gives every request the same rows, so what is left to plan is how many committed tokens each has. The
tail (rows in flight and own groups) has the same size for ever and is planned once.

Shape legend: B requests, W clean rows, G mask groups, K block size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_ext.core.block import BlockLayout
from sglang_ext.core.mask_bits import MaskPacker, PackedMask, Rows, pack, packed_bytes
from sglang_ext.serving.attention.flashinfer import InlineKeys, MergedMaskRows, MergedMeta
from sglang_ext.serving.attention.flashinfer_calls import HeadShape, Kernels, MaskMode, PagedCall
from sglang_ext.serving.attention.graph_room import GraphRoom
from sglang_ext.serving.pass_size import PassSize

PLAN_BYTES = 2 << 20
"""Plans of the calls that are planned before every replay: one buffer per kind of call, and pinned memory of that size
for each call. A plan for 65,536 rows takes about 300 KiB."""

TAIL_PLAN_BYTES = 1 << 20
"""Plan of a call that is planned once; each has its own. A few thousand rows take a tenth of it."""


class GraphRooms:
    """Buffers that captured passes of one process share.

    Args:
        kernels: makes the calls.
        largest_batch: B of the largest pass.
        context: most tokens of a request.
    """

    def __init__(self, kernels: Kernels, largest_batch: int, context: int) -> None:
        self.kernels = kernels
        self._slots = {
            kind: torch.zeros(largest_batch * context, dtype=torch.int32, device=kernels.device)
            for kind in ("clean", "prefix")
        }
        self._plans = {kind: self._bytes(PLAN_BYTES) for kind in self._slots}

    def clean(self, shape: HeadShape, batch: int, rows: int) -> PagedCall:
        """Return the call of a pass's clean rows; one per pass."""
        return self._paged("clean", MaskMode.CAUSAL, shape, batch, rows)

    def prefix(self, shape: HeadShape, batch: int, rows: int) -> PagedCall:
        """Return the call of a pass's mask rows over committed tokens; one per pass."""
        return self._paged("prefix", MaskMode.FULL, shape, batch, rows)

    def tail(self, batch: int, rows: int, mask_bytes: int) -> GraphRoom:
        """Return room for the call of a pass's mask rows over rows in flight."""
        return GraphRoom(batch, rows, self._bytes(TAIL_PLAN_BYTES), mask=self._bytes(mask_bytes))

    def _paged(self, kind: str, mode: MaskMode, shape: HeadShape, batch: int, rows: int) -> PagedCall:
        room = GraphRoom(batch, rows, self._plans[kind], slots=self._slots[kind])
        return self.kernels.paged(mode, shape, room)

    def _bytes(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self.kernels.device)


class GraphedRows:
    """Mask rows of one captured pass.

    Args:
        rows: the attention they belong to.
        rooms: shared buffers.
        size: of the pass; ``groups`` is 1 for a pass that drafts behind an accepted row.
        block_size: K.
        behind: whether the one group hangs from a row that only the device knows (:meth:`BlockLayout.after`).
    """

    def __init__(self, rows: MergedMaskRows, rooms: GraphRooms, size: PassSize, block_size: int, behind: bool) -> None:
        batch, own = size.batch, size.groups * block_size
        keys = size.width + own
        device = rooms.kernels.device
        queries, key_lens = (own,) * batch, (keys,) * batch
        self._size = size
        self._own = own
        self._packer = MaskPacker(queries, key_lens, Rows.MASK, device) if behind else None
        self._room = rooms.tail(batch, own, packed_bytes(queries, key_lens)[-1])
        self._prefix = rooms.prefix(rows.shape, batch, own)
        self._tail = rooms.kernels.ragged(MaskMode.CUSTOM, rows.shape, self._room)
        self._tail.plan(queries, key_lens, self._first_mask(block_size, queries, key_lens))
        place = torch.arange(batch * keys, device=device).view(batch, keys)
        self._pooled_at, self._own_at = (part.reshape(-1) for part in place.split([size.width, own], dim=1))
        self._key_lens = key_lens

    def _first_mask(self, block_size: int, queries: tuple[int, ...], keys: tuple[int, ...]) -> PackedMask:
        """The mask for good, or for a group behind row 0, until a replay writes its own."""
        size = self._size
        device = self._room.device
        zeros = (0,) * size.batch
        layout = BlockLayout.ragged(
            zeros, (size.width,) * size.batch, (size.groups,) * size.batch, block_size, device=device
        )
        found = pack(layout, Rows.MASK)
        assert (found.query_lens, found.key_lens) == (queries, keys)
        return found

    def plan(self, committed: Sequence[int], slots: Tensor) -> None:
        """Plan the next replay.

        Args:
            committed: committed tokens per request, 0 for a padded one.
            slots: ``[sum(committed)]`` int32 pool slots.
        """
        self._prefix.plan([self._own] * self._size.batch, committed, slots)

    def meta(self, layout: BlockLayout, cache_loc: Tensor) -> MergedMeta:
        """Return what layers attend with, inside the pass.

        Args:
            layout: rows of the pass.
            cache_loc: ``[B * W]`` int64 pool slots of its clean rows.
        """
        if self._packer is not None:
            assert self._room.mask is not None
            self._room.mask.copy_(self._packer.bits(layout.without_cache()))
        keys = InlineKeys(cache_loc, self._pooled_at, self._own_at, self._key_lens)
        return MergedMeta(self._prefix, self._tail, keys)
