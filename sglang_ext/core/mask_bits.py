"""The masks of a target pass as bits, the form attention kernels with a custom mask read.

A request's mask is its boolean matrix ``[queries, keys]`` row by row, eight entries to a byte, the first in the lowest
bit; rows are not padded, requests are padded to a whole byte. Its keys are the committed tokens, then the clean rows in
flight, then (for mask rows) the mask rows themselves.

The bits are computed straight from the layout on its device: no boolean matrix is built and nothing is read back, so
the sizes must be known on the host. Who sees whom is asked of :mod:`sglang_ext.core.masks`.

Shape legend: B requests, K block size, Q query rows of a request, S keys of a request, T bytes of the packed mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

import torch
from torch import Tensor

from sglang_ext.core.block import BlockLayout, RowMap
from sglang_ext.core.masks import CLEAN, visible

CHUNK_BYTES = 1 << 18
"""Bytes packed at once: bounds the scratch memory (8 entries of 8 bytes, several times over, per byte)."""

LARGEST_MASK = 2**31 - 1
"""Bytes that a 32-bit index pointer can address."""


class Rows(Enum):
    """Which rows of a pass ask: the clean ones or the mask rows."""

    CLEAN = "clean"
    MASK = "mask"


@dataclass(frozen=True, eq=False)
class PackedMask:
    """Masks of a batch, packed.

    Attributes:
        bits: ``[T]`` uint8.
        byte_ptr: ``[B+1]`` int32, first byte of each request, on the device of ``bits``.
        query_lens: Q per request.
        key_lens: S per request.
    """

    bits: Tensor
    byte_ptr: Tensor
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]

    def __post_init__(self) -> None:
        expected = packed_bytes(self.query_lens, self.key_lens)[-1]
        if self.bits.numel() != expected:
            raise ValueError(
                f"a packed mask of {self.bits.numel()} bytes was given for {list(self.query_lens)} x "
                f"{list(self.key_lens)} entries; exactly {expected} bytes are allowed: pack it from the same layout"
            )


def packed_bytes(query_lens: tuple[int, ...], key_lens: tuple[int, ...]) -> list[int]:
    """Return the B + 1 byte offsets of the packed masks of requests with these lengths.

    Raises:
        ValueError: the masks are too large for a 32-bit index pointer.
    """
    sizes = [(q * s + 7) // 8 for q, s in zip(query_lens, key_lens, strict=True)]
    pointer = [0, *accumulate(sizes)]
    if pointer[-1] > LARGEST_MASK:
        raise ValueError(
            f"the masks take {pointer[-1]} bytes; at most {LARGEST_MASK} are allowed: lower --max-running-requests or "
            "--context-length"
        )
    return pointer


def mask_lengths(layout: BlockLayout, rows: Rows) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return Q and S per request, rows that are only carried along included.

    Raises:
        ValueError: the committed lengths are not known on the host.
    """
    if layout.host_committed is None:
        raise ValueError(
            "the layout's committed lengths are on the device only; kernels are planned with lengths of the host: "
            "build the layout with host_committed"
        )
    pooled = [n + w for n, w in zip(layout.host_committed, layout.clean.carried, strict=True)]
    if rows is Rows.CLEAN:
        return layout.clean.carried, tuple(pooled)
    own = layout.mask.carried
    return own, tuple(s + m for s, m in zip(pooled, own, strict=True))


def pack(layout: BlockLayout, rows: Rows) -> PackedMask:
    """Pack what the clean rows (over the cache and each other) or the mask rows (over everything) may see.

    Args:
        layout: the pass; with ``layout.without_cache()`` the committed tokens are left out of the keys.
        rows: which rows are the queries.

    Raises:
        ValueError: the committed lengths are not known on the host, or the masks are too large.
    """
    query_lens, key_lens = mask_lengths(layout, rows)
    pointer = packed_bytes(query_lens, key_lens)
    device = layout.committed.device
    byte_ptr = torch.tensor(pointer, dtype=torch.int32).to(device, non_blocking=True)
    sizes = torch.tensor([query_lens, key_lens], dtype=torch.int64).to(device, non_blocking=True)
    bits = torch.empty(pointer[-1], dtype=torch.uint8, device=device)
    fill_bits(layout, rows, bits, byte_ptr, sizes)
    return PackedMask(bits, byte_ptr, query_lens, key_lens)


class MaskPacker:
    """Packs masks of one size again and again, with nothing from the host in between (a captured graph may do it).

    Args:
        query_lens, key_lens: Q and S per request.
        rows: which rows are the queries.
        device: where layouts live.
    """

    def __init__(
        self, query_lens: tuple[int, ...], key_lens: tuple[int, ...], rows: Rows, device: torch.device | str
    ) -> None:
        pointer = packed_bytes(query_lens, key_lens)
        self._rows = rows
        self._total = pointer[-1]
        self._byte_ptr = torch.tensor(pointer, dtype=torch.int32, device=device)
        self._sizes = torch.tensor([query_lens, key_lens], dtype=torch.int64, device=device)

    def bits(self, layout: BlockLayout) -> Tensor:
        """Return the ``[T]`` uint8 bits that :func:`pack` gives for a layout of these lengths."""
        found = torch.empty(self._total, dtype=torch.uint8, device=self._byte_ptr.device)
        fill_bits(layout, self._rows, found, self._byte_ptr, self._sizes)
        return found


def fill_bits(layout: BlockLayout, rows: Rows, bits: Tensor, byte_ptr: Tensor, sizes: Tensor) -> None:
    """Write packed bits ``[T]`` from sizes on the device: ``byte_ptr [B+1]`` int32, ``sizes [2, B]`` Q and S."""
    for start in range(0, bits.numel(), CHUNK_BYTES):
        stop = min(start + CHUNK_BYTES, bits.numel())
        bits[start:stop] = _pack_bytes(layout, rows, torch.arange(start, stop, device=bits.device), byte_ptr, sizes)


def _pack_bytes(layout: BlockLayout, rows: Rows, byte: Tensor, byte_ptr: Tensor, sizes: Tensor) -> Tensor:
    """Return the values ``[N]`` of the bytes with these numbers; ``sizes [2, B]`` are Q and S."""
    request = torch.searchsorted(byte_ptr[1:], byte, right=True)
    lane = torch.arange(8, device=byte.device)
    entry = (byte - byte_ptr[request]).unsqueeze(-1) * 8 + lane
    request = request.unsqueeze(-1).expand_as(entry)
    keys = sizes[1][request]
    query, key = entry // keys, entry % keys
    inside = query < sizes[0][request]
    seen = pair_visible(layout, rows, request, torch.where(inside, query, 0), key)
    return ((seen & inside).to(torch.int64) << lane).sum(-1).to(torch.uint8)


def pair_visible(layout: BlockLayout, rows: Rows, request: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return, for single pairs of any shape, whether query row ``query`` of ``request`` may attend to key ``key``.

    Args:
        layout: the pass.
        rows: which rows the query numbers count.
        request: int64 request numbers.
        query: int64 row numbers within the request; rows past the real ones see what the masks of
            :mod:`sglang_ext.core.block` let them see.
        key: int64 key numbers: committed tokens, clean rows carried, mask rows.
    """
    committed, carried = layout.committed[request], _carried(layout.clean)[request]
    in_flight = key - committed
    mask_key = in_flight - carried
    block = max(layout.block_size, 1)
    key_group = torch.where(mask_key < 0, CLEAN, mask_key.clamp_min(0) // block)
    if rows is Rows.CLEAN:
        query_row = torch.minimum(query, (layout.clean.counts - 1).clamp_min(0)[request])
        anchor = layout.row_positions[request, query_row]
        query_group = torch.full_like(query, CLEAN)
    else:
        query_row = query // block
        anchor = layout.anchors[request, query_row]
        query_group = query_row
    flight_row = in_flight.clamp(0, max(layout.clean.width - 1, 0))
    is_flight = (in_flight >= 0) & (in_flight < layout.clean.counts[request])
    position = key
    if layout.parent is not None and layout.clean.width:
        position = torch.where(is_flight, layout.row_positions[request, flight_row], key)
    ends = (tensor.unsqueeze(-1) for tensor in (anchor, query_group, position, key_group))
    seen = visible(*ends)[..., 0, 0]
    if layout.parent is not None and layout.clean.width:
        related = layout.ancestors[request, query_row, flight_row]
        seen = seen & (related | ~is_flight)
    return seen


def _carried(rows: RowMap) -> Tensor:
    """``[B]`` int64: rows each request takes up in the flat form, on the device."""
    return rows.ptr[1:] - rows.ptr[:-1]
