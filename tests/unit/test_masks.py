"""Laws of core.masks: one sentence, and training and serving read the same one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core.block import BlockLayout, clean_mask, mask_rows_mask
from sglang_ext.core.masks import CLEAN, tree_ancestors, visible

rows = st.lists(st.tuples(st.integers(-1, 6), st.integers(-1, 3)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=200)
@given(rows, rows)
def test_visible_is_its_sentence(queries: list[tuple[int, int]], keys: list[tuple[int, int]]) -> None:
    """A query sees a clean key at or before its anchor, and a mask key of its own group; nothing else."""
    query_anchor, query_group = torch.tensor(queries).unbind(-1)
    key_position, key_group = torch.tensor(keys).unbind(-1)
    seen = visible(query_anchor, query_group, key_position, key_group)
    for i, (anchor, group) in enumerate(queries):
        for j, (position, of) in enumerate(keys):
            assert bool(seen[i, j]) == (position <= anchor if of == CLEAN else of == group)


def test_visible_batches() -> None:
    generator = torch.Generator().manual_seed(3)
    anchor, position = (
        torch.randint(0, 9, (4, 5), generator=generator),
        torch.randint(0, 9, (4, 7), generator=generator),
    )
    group, of = torch.randint(-1, 2, (4, 5), generator=generator), torch.randint(-1, 2, (4, 7), generator=generator)
    together = visible(anchor, group, position, of)
    assert together.shape == (4, 5, 7)
    for i in range(4):
        assert torch.equal(together[i], visible(anchor[i], group[i], position[i], of[i]))


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_ancestors_follow_the_parents(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 8))
    parent = [-1] + [data.draw(st.integers(-1, row - 1)) for row in range(1, width)]
    got = tree_ancestors(torch.tensor([parent]))[0]
    for row in range(width):
        line, up = {row}, parent[row]
        while up >= 0:
            line.add(up)
            up = parent[up]
        assert set(got[row].nonzero().flatten().tolist()) == line


def test_a_chain_is_lower_triangular() -> None:
    parent = torch.arange(6).sub(1).expand(2, 6)
    assert torch.equal(tree_ancestors(parent), torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 6, 6))


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_training_block_is_a_serving_group(data: st.DataObject) -> None:
    """Same anchor, same sight and same positions (FlexDraft sections 3 and 6).

    Training: one sequence of S clean tokens and N blocks, block i with last accepted position p_i, its slots at
    p_i+1 .. p_i+K, seeing clean positions <= p_i and itself. Serving: n committed tokens, w rows in flight.
    """
    length, size = data.draw(st.integers(6, 12)), data.draw(st.integers(1, 4))
    committed = data.draw(st.integers(1, length - 2))
    width = data.draw(st.integers(1, length - committed))
    anchors = data.draw(st.lists(st.integers(committed, committed + width - 1), min_size=1, max_size=4, unique=True))

    block_group = torch.arange(len(anchors)).repeat_interleave(size)
    block_anchor = torch.tensor(anchors).repeat_interleave(size)
    block_position = block_anchor + 1 + torch.arange(size).repeat(len(anchors))
    clean_position = torch.arange(length)
    training = visible(
        torch.cat([clean_position, block_anchor]),
        torch.cat([torch.full((length,), CLEAN), block_group]),
        torch.cat([clean_position, block_position]),
        torch.cat([torch.full((length,), CLEAN), block_group]),
    )

    layout = BlockLayout.ragged([committed], [width], [width], size)
    serving = mask_rows_mask(layout, length)[0]
    for block, anchor in enumerate(anchors):
        group = anchor - committed
        in_training = slice(length + block * size, length + (block + 1) * size)
        in_serving = slice(group * size, (group + 1) * size)
        assert int(layout.anchors[0, group]) == anchor
        assert torch.equal(layout.mask_positions[0, in_serving], block_position[block * size : (block + 1) * size])
        assert torch.equal(training[in_training, :length], serving[in_serving, :length])
        shifted = slice(length + group * size, length + (group + 1) * size)
        assert torch.equal(training[in_training, in_training], serving[in_serving, shifted])
        assert serving[in_serving].sum() == training[in_training].sum(), "neither sees anything else"
    verified = clean_mask(layout, length)[0]
    assert torch.equal(training[committed : committed + width, :length], verified)
    assert not training[:length, length:].any(), "clean rows never see masks"
