"""Laws of core.block: FlexDraft section 3, sentence by sentence, against brute force over single rows and keys."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core.block import BlockLayout, RowMap, clean_mask, mask_rows_mask


@dataclass(frozen=True)
class Case:
    committed: list[int]
    widths: list[int]
    groups: list[int]
    block_size: int

    def ragged(self, parent: torch.Tensor | None = None) -> BlockLayout:
        return BlockLayout.ragged(self.committed, self.widths, self.groups, self.block_size, parent=parent)

    def padded(self) -> BlockLayout:
        return BlockLayout.uniform(
            torch.tensor(self.committed),
            max(self.widths),
            max(self.groups),
            self.block_size,
            widths=torch.tensor(self.widths),
            group_counts=torch.tensor(self.groups),
        )

    @property
    def keys(self) -> int:
        return max(n + w for n, w in zip(self.committed, self.widths, strict=True)) + 2


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Requests that verify, with no group up to one per clean row."""
    batch = draw(st.integers(1, 4))
    committed = [draw(st.integers(1, 6)) for _ in range(batch)]
    widths = [draw(st.integers(1, 5)) for _ in range(batch)]
    groups = [draw(st.integers(0, w)) for w in widths]
    return Case(committed, widths, groups, draw(st.integers(1, 4)))


# ---- rows -----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(cases())
def test_positions_are_the_papers(case: Case) -> None:
    layout = case.ragged()
    clean, request, parent, mask = [], [], [], []
    for i, (n, w, g) in enumerate(zip(case.committed, case.widths, case.groups, strict=True)):
        clean += [n + j for j in range(w)]
        request += [i] * w
        parent += [j - 1 for j in range(w)]
        mask += [n + k + 1 + slot for k in range(g) for slot in range(case.block_size)]
        assert layout.anchors[i].tolist() == [n + k if k < g else -1 for k in range(max(case.groups))]
    assert layout.clean_position.tolist() == clean
    assert layout.clean.request.tolist() == request
    assert layout.clean_parent.tolist() == parent
    assert layout.mask_position_flat.tolist() == mask
    assert layout.clean_ptr.tolist() == [sum(case.widths[:i]) for i in range(len(case.widths) + 1)]


@settings(deadline=None, max_examples=100)
@given(cases())
def test_the_padded_layout_has_the_same_real_rows(case: Case) -> None:
    ragged, padded = case.ragged(), case.padded()
    assert torch.equal(ragged.anchors, padded.anchors)
    assert torch.equal(ragged.mask_positions, padded.mask_positions)
    assert torch.equal(ragged.mask_groups, padded.mask_groups)
    assert torch.equal(ragged.clean.valid, padded.clean.valid)
    assert torch.equal(ragged.mask.valid, padded.mask.valid)
    assert torch.equal(padded.pad(padded.clean_position)[padded.clean.valid], ragged.clean_position)
    assert torch.equal(clean_mask(ragged, case.keys), clean_mask(padded, case.keys))
    assert torch.equal(mask_rows_mask(ragged, case.keys), mask_rows_mask(padded, case.keys))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_flat_and_padded_are_inverse(counts: list[int]) -> None:
    rows = RowMap.ragged(counts)
    flat = torch.randn(sum(counts), 3, generator=torch.Generator().manual_seed(1))
    padded = rows.pad(flat)
    assert padded.shape == (len(counts), max(counts), 3)
    assert torch.equal(rows.flatten(padded), flat)
    assert torch.equal(padded[rows.valid], flat)
    assert (padded[~rows.valid] == 0).all()
    if flat.numel():
        assert torch.equal(flat[rows.flat_index][rows.valid], flat), (
            "flat_index is safe everywhere and right where valid"
        )


def test_a_dense_map_moves_no_data() -> None:
    for rows in (RowMap.ragged([3, 3]), RowMap.padded(torch.tensor([1, 3]), 3)):
        flat = torch.arange(12.0).view(6, 2)
        assert rows.dense
        assert rows.pad(flat).data_ptr() == flat.data_ptr()
        assert rows.flatten(rows.pad(flat)).data_ptr() == flat.data_ptr()
        assert rows.flat_index.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert rows.padded_index.tolist() == list(range(6))


# ---- who sees whom --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(cases())
def test_clean_rows_are_causal_and_never_see_masks(case: Case) -> None:
    seen = clean_mask(case.ragged(), case.keys)
    assert seen.shape == (len(case.widths), max(case.widths), case.keys), "there is no column for a mask row"
    for i, (n, w) in enumerate(zip(case.committed, case.widths, strict=True)):
        for j in range(w):
            assert seen[i, j].tolist() == [slot <= n + j for slot in range(case.keys)]
        for j in range(w, max(case.widths)):  # padding: never empty, never a slot that holds nothing
            assert seen[i, j].any() and not seen[i, j, n + w :].any()


@settings(deadline=None, max_examples=100)
@given(cases())
def test_a_group_sees_the_cache_its_accepted_rows_and_itself(case: Case) -> None:
    """Group k sees: the cache, clean rows 0..k, itself (bidirectional); no other group."""
    seen = mask_rows_mask(case.ragged(), case.keys)
    size, most = case.block_size, max(case.groups)
    assert seen.shape == (len(case.widths), most * size, case.keys + most * size)
    for i, (n, g) in enumerate(zip(case.committed, case.groups, strict=True)):
        for k in range(most):
            for slot in range(size):
                row = seen[i, k * size + slot]
                cache = list(range(n)) if k < g else []
                accepted = [n + j for j in range(k + 1)] if k < g else []
                own = [case.keys + k * size + other for other in range(size)]
                assert row.nonzero().flatten().tolist() == cache + accepted + own


def test_groups_are_independent() -> None:
    """Taking one group away changes nothing for the others."""
    both = mask_rows_mask(BlockLayout.ragged([5], [3], [3], 2), 8)
    fewer = mask_rows_mask(BlockLayout.ragged([5], [3], [2], 2), 8)
    assert torch.equal(both[:, :4, :12], fewer)
    assert not both[:, :4, 12:].any()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 4), st.integers(1, 4))
def test_the_sequential_pass_is_the_accepted_group(committed: list[int], accepted: int, size: int) -> None:
    """After a of the rows are accepted, the sequential group equals parallel group a in positions and sight."""
    width, batch = 5, len(committed)
    parallel = BlockLayout.uniform(torch.tensor(committed), width, width, size)
    after = torch.tensor(committed) + accepted + 1
    sequential = BlockLayout.sequential(after, size)
    assert (sequential.clean.total, sequential.groups.width, sequential.mask.total) == (0, 1, batch * size)
    assert torch.equal(sequential.anchors[:, 0], after - 1)
    rows = slice(accepted * size, (accepted + 1) * size)
    keys = max(committed) + width
    assert torch.equal(sequential.anchors[:, 0], parallel.anchors[:, accepted])
    assert torch.equal(sequential.mask_positions, parallel.mask_positions[:, rows])
    assert torch.equal(mask_rows_mask(sequential, keys)[..., :keys], mask_rows_mask(parallel, keys)[:, rows, :keys])
    assert mask_rows_mask(sequential, keys)[..., keys:].all()


@settings(deadline=None, max_examples=150)
@given(cases(), st.data())
def test_drafting_behind_an_accepted_row_is_the_sequential_pass(case: Case, data: st.DataObject) -> None:
    """Said in the lengths before the step and a row number, or in the lengths after it: the same rows see the same."""
    accepted = [data.draw(st.integers(0, width - 1)) for width in case.widths]
    carried = max(case.widths) + data.draw(st.integers(0, 2))
    before = BlockLayout.uniform(
        torch.tensor(case.committed), carried, 0, case.block_size, widths=torch.tensor(case.widths)
    )
    after = before.after(torch.tensor(accepted))
    lengths = torch.tensor(case.committed) + torch.tensor(accepted) + 1
    plain = BlockLayout.sequential(lengths, case.block_size)
    assert torch.equal(after.mask_position_flat, plain.mask_position_flat)
    assert torch.equal(mask_rows_mask(after, case.keys + 2), mask_rows_mask(plain, case.keys + 2))
    assert after.groups.carried == (1,) * after.batch


def test_drafting_behind_a_row_of_a_tree_is_refused() -> None:
    layout = BlockLayout.ragged([3], [3], [1], 2, parent=torch.tensor([[-1, 0, 0]]))
    with pytest.raises(ValueError, match="tree"):
        layout.after(torch.tensor([1]))


def test_verification_and_a_lone_draft_share_one_batch() -> None:
    """A newly prefilled request (no clean rows, one group) beside one that verifies two drafts."""
    for parent in (None, torch.tensor([[-1, 0, 1], [-1, 0, 1]])):
        layout = BlockLayout.ragged([4, 7], [0, 3], [1, 2], 2, parent=parent)
        assert layout.anchors.tolist() == [[3, -1], [7, 8]]
        assert layout.mask_position_flat.tolist() == [4, 5, 8, 9, 9, 10]
        assert layout.clean_position.tolist() == [7, 8, 9]
        assert mask_rows_mask(layout, 10)[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 10, 11]


# ---- trees ----------------------------------------------------------------------------------------------------------


def ancestors(parent: list[int], row: int) -> list[int]:
    line = [row]
    while parent[line[-1]] >= 0:
        line.append(parent[line[-1]])
    return line


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_tree_row_sees_the_cache_and_its_own_line(data: st.DataObject) -> None:
    batch, width, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    committed = [data.draw(st.integers(1, 4)) for _ in range(batch)]
    parents = [[-1] + [data.draw(st.integers(0, row - 1)) for row in range(1, width)] for _ in range(batch)]
    groups = data.draw(st.integers(0, width))
    layout = BlockLayout.uniform(torch.tensor(committed), width, groups, size, parent=torch.tensor(parents))
    keys = max(committed) + width + 1
    clean, mask = clean_mask(layout, keys), mask_rows_mask(layout, keys)
    for i, (n, parent) in enumerate(zip(committed, parents, strict=True)):
        for row in range(width):
            line = ancestors(parent, row)
            slots = sorted([*range(n), *[n + above for above in line]])
            assert layout.clean_position.view(batch, width)[i, row] == n + len(line) - 1
            assert clean[i, row].nonzero().flatten().tolist() == slots
            if row < groups:
                assert layout.anchors[i, row] == n + len(line) - 1
                own = [keys + row * size + slot for slot in range(size)]
                for slot in range(size):
                    assert layout.mask_positions[i, row * size + slot] == n + len(line) + slot
                    assert mask[i, row * size + slot].nonzero().flatten().tolist() == slots + own


@settings(deadline=None, max_examples=50)
@given(cases())
def test_a_chain_written_as_a_tree_changes_nothing(case: Case) -> None:
    parent = (torch.arange(max(case.widths)) - 1).expand(len(case.widths), -1)
    chain, tree = case.ragged(), case.ragged(parent)
    for name in ("clean_position", "clean_parent", "anchors", "mask_positions"):
        assert torch.equal(getattr(chain, name), getattr(tree, name))
    assert torch.equal(clean_mask(chain, case.keys), clean_mask(tree, case.keys))
    assert torch.equal(mask_rows_mask(chain, case.keys), mask_rows_mask(tree, case.keys))


# ---- no read-back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [False, True])
def test_a_padded_layout_reads_nothing_back(tree: bool) -> None:
    """On the meta device every read of a value, and every shape that depends on one, is an error."""
    count = torch.empty(3, dtype=torch.int64, device="meta")
    parent = torch.empty(3, 4, dtype=torch.int64, device="meta") if tree else None
    layout = BlockLayout.uniform(count, 4, 3, 2, widths=count, group_counts=count, parent=parent)
    assert clean_mask(layout, 20).shape == (3, 4, 20)
    assert mask_rows_mask(layout, 20).shape == (3, 6, 26)
    assert layout.clean_parent.shape == layout.clean_position.shape == (12,)
    assert layout.mask_position_flat.shape == (18,)
    assert layout.pad(layout.clean_position).shape == layout.clean.flat_index.shape == (3, 4)
    assert mask_rows_mask(BlockLayout.sequential(count, 8), 20).shape == (3, 8, 28)


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_a_group_without_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"groups \[3\] exceed clean rows \[2\]"):
        BlockLayout.ragged([4], [2], [3], 4)
    with pytest.raises(ValueError, match="2 groups with 0 clean rows"):
        BlockLayout.uniform(torch.tensor([4]), 0, 2, 4)
    with pytest.raises(ValueError, match="1 committed lengths, 2 widths"):
        BlockLayout.ragged([4], [2, 2], [1], 4)
