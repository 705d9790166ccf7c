"""Packed masks say, bit by bit, what the one mask function says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core import mask_bits
from sglang_ext.core.block import BlockLayout, clean_mask, mask_rows_mask
from sglang_ext.core.mask_bits import MaskPacker, PackedMask, Rows, mask_lengths, pack, packed_bytes
from sglang_ext.core.masks import CLEAN, visible

LAWS = settings(max_examples=120, deadline=None, print_blob=True)


@dataclass
class Case:
    layout: BlockLayout
    widths: list[int]
    groups: list[int]


@st.composite
def trees(draw, batch: int, width: int) -> torch.Tensor:
    rows = [[-1, *(draw(st.integers(0, row - 1)) for row in range(1, width))] for _ in range(batch)]
    return torch.tensor(rows, dtype=torch.int64).view(batch, width)


@st.composite
def cases(draw, longest: int = 200) -> Case:
    """Ragged layouts, and padded ones whose real counts are on the device; chains and trees."""
    batch, block = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    committed = [draw(st.integers(1, longest)) for _ in range(batch)]
    if draw(st.booleans()):
        widths = [draw(st.integers(0, 9)) for _ in range(batch)]
        groups = [draw(st.integers(0, max(width, 1))) for width in widths]
        parent = draw(trees(batch, max(widths))) if max(widths) and draw(st.booleans()) else None
        return Case(BlockLayout.ragged(committed, widths, groups, block, parent=parent), widths, groups)
    width = draw(st.integers(0, 9))
    group = draw(st.integers(0, max(width, 1)))
    real = [draw(st.integers(min(1, width), width)) for _ in range(batch)]
    parent = draw(trees(batch, width)) if width and draw(st.booleans()) else None
    layout = BlockLayout.uniform(
        torch.tensor(committed), width, group, block, widths=torch.tensor(real) if width else None,
        parent=parent, host_committed=committed,
    )  # fmt: skip
    return Case(layout, [width] * batch, [group] * batch)


def dense(case: Case, rows: Rows, committed: list[int]) -> list[torch.Tensor]:
    """One boolean ``[Q, S]`` per request, cut from the padded masks of the layout."""
    layout = case.layout
    keys = max(n + w for n, w in zip(committed, case.widths))
    padded = clean_mask(layout, keys) if rows is Rows.CLEAN else mask_rows_mask(layout, keys)
    found = []
    for i, (n, width, group) in enumerate(zip(committed, case.widths, case.groups)):
        if rows is Rows.CLEAN:
            found.append(padded[i, :width, : n + width])
            continue
        own = group * layout.block_size
        found.append(torch.cat([padded[i, :own, : n + width], padded[i, :own, keys : keys + own]], 1))
    return found


def unpacked(mask: PackedMask) -> list[torch.Tensor]:
    """Read a packed mask the way a kernel does: byte offset of the request, then bit ``q * S + s``."""
    buffer, start = mask.bits.numpy(), mask.byte_ptr.tolist()
    found = []
    for i, (queries, keys) in enumerate(zip(mask.query_lens, mask.key_lens)):
        bit = np.arange(queries * keys, dtype=np.uint64)
        byte = buffer[start[i] + (bit // 8).astype(np.int64)]
        found.append(torch.from_numpy(((byte >> (bit % 8).astype(np.uint8)) & 1).astype(bool)).view(queries, keys))
    return found


@LAWS
@given(case=cases(), rows=st.sampled_from(list(Rows)), chunk=st.sampled_from([1, 7, 64, mask_bits.CHUNK_BYTES]))
def test_bits_are_the_dense_mask(case: Case, rows: Rows, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_bits, "CHUNK_BYTES", max(chunk, packed_size(case.layout, rows) // 50 + 1))
        packed = pack(case.layout, rows)
    expected = dense(case, rows, case.layout.committed.tolist())
    assert packed.bits.dtype == torch.uint8
    assert packed.byte_ptr.dtype == torch.int32
    for found, wanted in zip(unpacked(packed), expected, strict=True):
        assert torch.equal(found, wanted)
    reference = [np.packbits(mask.numpy().reshape(-1), bitorder="little") for mask in expected]
    assert np.array_equal(packed.bits.numpy(), np.concatenate(reference)), "padding bits are zero"
    assert packed.byte_ptr.tolist() == [0, *np.cumsum([len(part) for part in reference]).tolist()]


def packed_size(layout: BlockLayout, rows: Rows) -> int:
    return packed_bytes(*mask_lengths(layout, rows))[-1]


@LAWS
@given(case=cases())
def test_without_the_cache_the_same_columns_remain(case: Case) -> None:
    """The masks of the rows in flight are the last columns of the whole masks, wherever a request stands."""
    whole = dense(case, Rows.MASK, case.layout.committed.tolist())
    tail = unpacked(pack(case.layout.without_cache(), Rows.MASK))
    for committed, complete, part in zip(case.layout.host_committed, whole, tail, strict=True):
        assert torch.equal(complete[:, committed:], part)


@LAWS
@given(case=cases(40))
def test_committed_tokens_are_seen_by_every_mask_row_of_a_real_group(case: Case) -> None:
    """Why a pass over the cache needs no mask."""
    layout = case.layout
    for i, mask in enumerate(unpacked(pack(layout, Rows.MASK))):
        real = int(layout.groups.counts[i]) * layout.block_size
        assert mask[:real, : layout.host_committed[i]].all()


@LAWS
@given(case=cases(60), rows=st.sampled_from(list(Rows)), cached=st.booleans())
def test_no_row_sees_nothing(case: Case, rows: Rows, cached: bool) -> None:
    """Softmax over nothing is undefined: every row, real or only carried along, sees itself or a token before it."""
    layout = case.layout if cached else case.layout.without_cache()
    for mask in unpacked(pack(layout, rows)):
        assert mask.any(-1).all()


@pytest.mark.parametrize("length", [*range(1, 41), 63, 64, 65, 127, 128, 199, 200])
def test_every_length_against_one_row_at_a_time(length: int) -> None:
    """Written from the definition, a pair at a time, for a parallel pass of 3 rows, 2 groups and blocks of 5."""
    width, groups, block = 3, 2, 5
    layout = BlockLayout.ragged([length, 7], [width, width], [groups, groups], block)
    found = unpacked(pack(layout, Rows.MASK))[0]
    for query in range(groups * block):
        group = query // block
        for key in range(length + width + groups * block):
            flight = key - length - width
            key_group = CLEAN if flight < 0 else flight // block
            pair = [torch.tensor([value]) for value in (length + group, group, key, key_group)]
            assert bool(found[query, key]) == bool(visible(*pair)), (query, key)


def test_unpadded_requests_do_not_start_at_an_eighth_of_their_bit_offset() -> None:
    """Index pointers count bytes, and bits divided by eight would be another number."""
    packed = pack(BlockLayout.ragged([12, 11, 4], [3, 3, 2], [1, 2, 1], 3), Rows.MASK)
    bits = np.cumsum([0, *(q * s for q, s in zip(packed.query_lens, packed.key_lens))])
    assert packed.byte_ptr.tolist() != (bits // 8).tolist()


def test_packing_reads_nothing_back() -> None:
    """On the meta device every read of a value, and every shape that depends on one, is an error."""
    committed = torch.empty(3, dtype=torch.int64, device="meta")
    for parent in (None, torch.empty(3, 4, dtype=torch.int64, device="meta")):
        layout = BlockLayout.uniform(
            committed, 4, 3, 2, widths=committed, group_counts=committed, parent=parent, host_committed=(5, 9, 200)
        )
        for rows in Rows:
            packed = pack(layout, rows)
            assert packed.bits.device.type == packed.byte_ptr.device.type == "meta"
            assert packed.bits.numel() == packed_size(layout, rows)
        assert pack(layout.without_cache(), Rows.MASK).key_lens == (10, 10, 10)


@pytest.mark.parametrize("accepted", [[0, 0, 0], [1, 0, 3], [3, 3, 3]])
def test_a_packer_packs_again_and_again(accepted: list[int]) -> None:
    layout = BlockLayout.uniform(torch.tensor([4, 1, 9]), 4, 0, 3, host_committed=[4, 1, 9])
    after = layout.after(torch.tensor(accepted)).without_cache()
    expected = pack(after, Rows.MASK)
    packer = MaskPacker(expected.query_lens, expected.key_lens, Rows.MASK, "cpu")
    for _ in range(2):
        assert torch.equal(packer.bits(after), expected.bits)


def test_sizes_are_asserted() -> None:
    with pytest.raises(ValueError, match="exactly 13 bytes are allowed"):
        PackedMask(torch.zeros(12, dtype=torch.uint8), torch.tensor([0, 13]), (10,), (10,))
    with pytest.raises(ValueError, match="at most 2147483647"):
        packed_bytes((1 << 16, 1 << 16), (1 << 18, 1 << 12))
    with pytest.raises(ValueError, match="host_committed"):
        mask_lengths(BlockLayout.sequential(torch.tensor([4]), 3), Rows.MASK)
    assert mask_lengths(BlockLayout.sequential(torch.tensor([4]), 3, [4]), Rows.MASK) == ((3,), (7,))
