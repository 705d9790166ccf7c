"""Mask rows on a GPU through FlashInfer: the parallel pass, the sequential block and a drafter's own block.

Two forms compute the same attention from the same :class:`~sglang_ext.core.block.BlockLayout`:

* ``merged`` (the default): every mask row of a real group sees all committed tokens, so those are attended without a
  mask, straight from the pool. What is left, the clean rows in flight and the rows' own groups, is a small packed call
  whose mask does not depend on the context. The two are merged by their log-sum-exp.
* ``masked``: one packed call over everything with a custom mask. It copies each request's keys out of the pool first,
  because mask rows have no slots there; it is the plain statement of the rule, to check the other form by.

Mask rows never enter the pool. Clean rows of the same pass must be in it before mask rows of that layer are attended.

Shape legend: B requests, N mask rows, S keys, P pool slots, Hq query heads, Hk key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_ext.core.block import BlockLayout
from sglang_ext.core.mask_bits import PackedMask, Rows, mask_lengths, pack, packed_bytes
from sglang_ext.kernels.pool_slots import PackedRows, inline_places, slots_of
from sglang_ext.serving.attention.flashinfer_calls import (
    HeadShape,
    Kernels,
    MaskMode,
    PagedCall,
    RaggedCall,
    apply_sinks,
)

KEPT_TAIL_MASKS = 64
"""Tail masks kept; one per combination of row counts, a few hundred bytes each."""


@dataclass(frozen=True, eq=False)
class InlineKeys:
    """Packed keys of a pass: some of each request's pooled rows, then its mask rows.

    Attributes:
        slots: ``[M]`` int64 pool slots of the pooled rows.
        pooled_at, own_at: ``[M]``, ``[N]`` int64 places in the packed keys.
        lengths: S per request.
    """

    slots: Tensor
    pooled_at: Tensor
    own_at: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def build(
        cls, table: Tensor, requests: Tensor, first: Tensor | None, pooled: Sequence[int], own: Sequence[int]
    ) -> InlineKeys:
        """Lay out ``pooled`` rows from position ``first`` on and ``own`` mask rows, per request."""
        lengths = tuple(p + o for p, o in zip(pooled, own, strict=True))
        places = inline_places(table, requests, first, PackedRows.of(pooled, own, table.device))
        return cls(places.slots, places.pooled_at, places.own_at, lengths)

    def fill(self, pool: Tensor, own: Tensor, scale: float | None) -> Tensor:
        """Return ``[sum(S), Hk, D]`` in the dtype of ``own [N, Hk, D]``; pooled rows are multiplied by ``scale``."""
        if not self.slots.shape[0]:
            return own.contiguous()
        rows = pool[self.slots].to(own.dtype)
        packed = own.new_empty((sum(self.lengths), *own.shape[1:]))
        packed[self.pooled_at] = rows if scale is None else rows * scale
        packed[self.own_at] = own
        return packed


@dataclass(frozen=True, eq=False)
class _Asked:
    """The requests of a layout that bring mask rows; the others take no part in a call.

    Attributes:
        slots: ``[B]`` rows of the host's slot table.
        committed: ``[B]`` int64.
        host_committed, clean, own: committed tokens, clean rows and mask rows per request.
    """

    slots: Tensor
    committed: Tensor
    host_committed: tuple[int, ...]
    clean: tuple[int, ...]
    own: tuple[int, ...]

    @classmethod
    def of(cls, slots: Tensor, layout: BlockLayout) -> _Asked:
        own, _ = mask_lengths(layout, Rows.MASK)
        assert layout.host_committed is not None
        clean, committed = layout.clean.carried, layout.host_committed
        kept = [i for i, rows in enumerate(own) if rows]
        if not kept:
            raise ValueError("the layout has no mask rows; there is nothing to attend: skip the pass")
        if len(kept) < len(own):
            index = torch.tensor(kept).to(slots.device, non_blocking=True)
            slots, device_committed = slots[index], layout.committed[index]
        else:
            device_committed = layout.committed
        return cls(slots, device_committed, *(tuple(part[i] for i in kept) for part in (committed, clean, own)))


def _asked_mask(layout: BlockLayout) -> PackedMask:
    """Pack the masks of mask rows, requests without any left out (they take no bytes)."""
    mask = pack(layout, Rows.MASK)
    kept = [i for i, rows in enumerate(mask.query_lens) if rows]
    if len(kept) == len(mask.query_lens):
        return mask
    queries, keys = (tuple(part[i] for i in kept) for part in (mask.query_lens, mask.key_lens))
    byte_ptr = torch.tensor(packed_bytes(queries, keys), dtype=torch.int32)
    return PackedMask(mask.bits, byte_ptr.to(mask.bits.device, non_blocking=True), queries, keys)


@dataclass(frozen=True, eq=False)
class MergedMeta:
    """A planned pass in the ``merged`` form."""

    prefix: PagedCall
    tail: RaggedCall
    keys: InlineKeys


@dataclass(frozen=True, eq=False)
class MaskedMeta:
    """A planned pass in the ``masked`` form."""

    call: RaggedCall
    keys: InlineKeys


class _FlashInferRows:
    """What both forms share.

    Args:
        source: has ``req_to_token_pool`` and ``token_to_kv_pool``; both may be allocated after construction.
        kernels: FlashInfer, or its twin.
        shape: heads of the layers.
    """

    def __init__(self, source: Any, kernels: Kernels, shape: HeadShape) -> None:
        self._source = source
        self._kernels = kernels
        self.shape = shape

    def _pools(self, layer: Any) -> tuple[Tensor, Tensor]:
        if layer.scaling != self.shape.scaling:
            raise ValueError(f"layer {layer.layer_id} scales by {layer.scaling}, not {self.shape.scaling} as planned")
        pool = self._source.token_to_kv_pool
        return pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)

    def _scales(self, layer: Any) -> tuple[float | None, float | None]:
        """What the host divided keys and values by before it rounded them to 8 bits."""
        if self.shape.kv_dtype == self.shape.dtype:
            return None, None
        return layer.k_scale_float, layer.v_scale_float


class MergedMaskRows(_FlashInferRows):
    """The :class:`~.mask_rows.MaskAttention` of a GPU: committed tokens without a mask, the rest with a small one."""

    def __init__(self, source: Any, kernels: Kernels, shape: HeadShape) -> None:
        super().__init__(source, kernels, shape)
        # Two of each: a pass may be planned while the one before is still in the stream.
        self._prefixes = [kernels.paged(MaskMode.FULL, shape) for _ in range(2)]
        self._tails = {
            mode: [kernels.ragged(mode, shape) for _ in range(2)] for mode in (MaskMode.FULL, MaskMode.CUSTOM)
        }
        self._turn = 0
        self._masks: dict[tuple[Any, ...], PackedMask] = {}

    def prepare(self, slots: Tensor, layout: BlockLayout, keys: int) -> MergedMeta:
        """Plan the mask rows of ``layout`` for requests in ``slots [B]``; ``keys`` is not needed here.

        Raises:
            ValueError: the committed lengths are not known on the host.
        """
        table = self._source.req_to_token_pool.req_to_token
        asked = _Asked.of(slots, layout)
        self._turn = 1 - self._turn
        prefix = self._prefixes[self._turn]
        prefix.plan(asked.own, asked.host_committed, slots_of(table, asked.slots, None, asked.host_committed))
        inline = InlineKeys.build(table, asked.slots, asked.committed, asked.clean, asked.own)
        alone = not any(asked.clean) and all(rows <= layout.block_size for rows in asked.own)
        # One group without clean rows sees all of itself.
        mode = MaskMode.FULL if alone else MaskMode.CUSTOM
        tail = self._tails[mode][self._turn]
        tail.plan(asked.own, inline.lengths, None if alone else self._tail_mask(layout))
        return MergedMeta(prefix, tail, inline)

    def _tail_mask(self, layout: BlockLayout) -> PackedMask:
        """The mask over rows in flight, which row counts decide alone.

        A layout whose real counts are on the device is packed as if all rows it carries were real: rows of a real
        group see the same either way, and nobody reads the others.
        """
        if layout.parent is not None or layout.behind is not None:
            return _asked_mask(layout.without_cache())
        counts = (layout.clean.carried, layout.groups.carried)
        key = (*counts, layout.block_size, layout.committed.device)
        if key not in self._masks:
            if len(self._masks) >= KEPT_TAIL_MASKS:
                self._masks.pop(next(iter(self._masks)))
            whole = BlockLayout.ragged((0,) * layout.batch, *counts, layout.block_size, device=layout.committed.device)
            self._masks[key] = _asked_mask(whole)
        return self._masks[key]

    def attend(
        self, layer: Any, q: Tensor, k: Tensor, v: Tensor, meta: MergedMeta, sinks: Tensor | None = None
    ) -> Tensor:
        """Return ``[N, Hq * D]`` for flat mask rows q ``[N, Hq, D]``, k and v ``[N, Hk, D]``; ``sinks [Hq]``."""
        keys, values = self._pools(layer)
        k_scale, v_scale = self._scales(layer)
        q = q.contiguous()
        prefix = meta.prefix.run(q, keys, values, k_scale, v_scale)
        tail = meta.tail.run(q, meta.keys.fill(keys, k, k_scale), meta.keys.fill(values, v, v_scale))
        out, lse = self._kernels.merge(prefix, tail)
        return (out if sinks is None else apply_sinks(out, lse, sinks)).flatten(1)


class MaskedMaskRows(_FlashInferRows):
    """The :class:`~.mask_rows.MaskAttention` of a GPU as one call with one custom mask over all keys."""

    def __init__(self, source: Any, kernels: Kernels, shape: HeadShape) -> None:
        super().__init__(source, kernels, shape)
        self._calls = [kernels.ragged(MaskMode.CUSTOM, shape) for _ in range(2)]
        self._turn = 0

    def prepare(self, slots: Tensor, layout: BlockLayout, keys: int) -> MaskedMeta:
        """Plan the mask rows of ``layout`` for requests in ``slots [B]``; ``keys`` is not needed here.

        Raises:
            ValueError: the committed lengths are not known on the host, or the masks are too large.
        """
        asked = _Asked.of(slots, layout)
        pooled = [n + w for n, w in zip(asked.host_committed, asked.clean, strict=True)]
        table = self._source.req_to_token_pool.req_to_token
        inline = InlineKeys.build(table, asked.slots, None, pooled, asked.own)
        self._turn = 1 - self._turn
        call = self._calls[self._turn]
        call.plan(asked.own, inline.lengths, _asked_mask(layout))
        return MaskedMeta(call, inline)

    def attend(
        self, layer: Any, q: Tensor, k: Tensor, v: Tensor, meta: MaskedMeta, sinks: Tensor | None = None
    ) -> Tensor:
        """Return ``[N, Hq * D]`` for flat mask rows q ``[N, Hq, D]``, k and v ``[N, Hk, D]``; ``sinks [Hq]``."""
        keys, values = self._pools(layer)
        k_scale, v_scale = self._scales(layer)
        out, lse = meta.call.run(q.contiguous(), meta.keys.fill(keys, k, k_scale), meta.keys.fill(values, v, v_scale))
        return (out if sinks is None else apply_sinks(out, lse, sinks)).flatten(1)


FORMS: dict[str, type[MergedMaskRows] | type[MaskedMaskRows]] = {"merged": MergedMaskRows, "masked": MaskedMaskRows}
"""The forms by the names a user may type."""
