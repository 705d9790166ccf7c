"""The fused mask says, bit by bit, what the packer says that asks the one mask function."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core.block import BlockLayout
from sglang_ext.core.mask_bits import Rows, pack
from sglang_ext.kernels import mask_bytes
from sglang_ext.kernels.mask_bytes import MaskSizes, pack_fused

LAWS = settings(max_examples=25, deadline=None, print_blob=True)


def assert_equal(layout: BlockLayout) -> None:
    """Compare both kinds of rows, with the cache among the keys and without it."""
    for part, rows in itertools.product((layout, layout.without_cache()), Rows):
        expected, found = pack(part, rows), pack_fused(part, MaskSizes.of(part, rows))
        assert torch.equal(found.bits, expected.bits), (part.host_committed, part.clean.carried, part.groups.carried)
        assert torch.equal(found.byte_ptr, expected.byte_ptr)
        assert (found.byte_ptr.dtype, found.bits.dtype) == (torch.int32, torch.uint8)
        assert (found.query_lens, found.key_lens) == (expected.query_lens, expected.key_lens)


@pytest.mark.parametrize("block", [1, 2, 3])
def test_every_small_ragged_layout(block: int) -> None:
    """All clean rows from 0 to 4 with all groups they can carry, over caches of 1 to 4 tokens, in one batch."""
    cases = [
        (committed, width, groups)
        for committed, width in itertools.product(range(1, 5), range(5))
        for groups in range(max(width, 1) + 1)
    ]
    assert_equal(BlockLayout.ragged(*(list(part) for part in zip(*cases)), block))


def padded() -> Iterator[tuple[int, int, int]]:
    for width in range(4):
        for groups in range(max(width, 1) + 1):
            for block in (1, 2):
                yield width, groups, block


@pytest.mark.parametrize(("width", "groups", "block"), padded())
def test_every_small_padded_layout(width: int, groups: int, block: int) -> None:
    """Counts on the device, every real width and group count up to what is carried, also none at all."""
    cases = list(itertools.product((1, 2), range(width + 1), range(groups + 1)))
    committed, widths, counts = (torch.tensor(part) for part in zip(*cases))
    layout = BlockLayout.uniform(
        committed, width, groups, block, widths=widths, group_counts=counts, host_committed=committed.tolist()
    )
    assert_equal(layout)


@pytest.mark.parametrize("block", range(1, 10))
def test_every_small_sequential_layout(block: int) -> None:
    lengths = list(range(1, 12))
    assert_equal(BlockLayout.sequential(torch.tensor(lengths), block, lengths))


@st.composite
def layouts(draw) -> BlockLayout:
    batch, block = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    committed = [draw(st.integers(1, 150)) for _ in range(batch)]
    if draw(st.booleans()):
        widths = [draw(st.integers(0, 8)) for _ in range(batch)]
        return BlockLayout.ragged(committed, widths, [draw(st.integers(0, max(w, 1))) for w in widths], block)
    width = draw(st.integers(0, 8))
    groups = draw(st.integers(0, max(width, 1)))
    widths = torch.tensor([draw(st.integers(0, width)) for _ in committed])
    counts = torch.tensor([draw(st.integers(0, groups)) for _ in committed]) if draw(st.booleans()) else None
    return BlockLayout.uniform(
        torch.tensor(committed), width, groups, block, widths=widths, group_counts=counts, host_committed=committed
    )


@LAWS
@given(layout=layouts(), size=st.sampled_from([64, 256]), wide=st.booleans())
def test_larger_layouts(layout: BlockLayout, size: int, wide: bool) -> None:
    """Any number of programs per request, with 32-bit entry numbers and with 64-bit ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_bytes, "BYTES", size)
        if wide:
            patch.setattr(mask_bytes, "LARGEST_NARROW", -1)
        assert_equal(layout)


def test_trees_stay_with_the_twin() -> None:
    layout = BlockLayout.ragged([5], [3], [1], 2, parent=torch.tensor([[-1, 0, 0]]))
    with pytest.raises(ValueError, match="for chains"):
        MaskSizes.of(layout, Rows.MASK)


def test_sizes_need_the_host() -> None:
    with pytest.raises(ValueError, match="host_committed"):
        MaskSizes.of(BlockLayout.sequential(torch.tensor([4]), 3), Rows.MASK)


def test_nothing_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device every read of a value is an error; the launch itself is all that is left out."""
    launched = []
    monkeypatch.setattr(mask_bytes, "launch", lambda kernel, grid, *arguments, **constants: launched.append(grid))
    counts = torch.empty(3, dtype=torch.int64, device="meta")
    layout = BlockLayout.uniform(counts, 4, 3, 2, widths=counts, group_counts=counts, host_committed=(5, 9, 2000))
    for rows in Rows:
        packed, expected = pack_fused(layout, MaskSizes.of(layout, rows)), pack(layout, rows)
        assert packed.bits.shape == expected.bits.shape
        assert packed.bits.device.type == packed.byte_ptr.device.type == "meta"
    assert launched == [(4, 3), (6, 3)]
