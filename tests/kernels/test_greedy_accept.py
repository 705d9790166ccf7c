"""Greedy acceptance, fused and not."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core.accept import AcceptRule, accept
from sglang_ext.core.block import RowMap
from sglang_ext.kernels.greedy_accept import greedy_accept, greedy_accept_fused

LAWS = settings(max_examples=80, deadline=None, print_blob=True)


def assert_equal(choices, clean, drafts, valid, pad=0) -> None:
    expected = greedy_accept(choices, clean, drafts, valid, pad)
    found = greedy_accept_fused(choices, clean, drafts, valid, pad)
    for name in ("lengths", "bonus", "tokens"):
        assert getattr(found, name).dtype == torch.int64
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("width", [1, 2, 3])
def test_every_small_chain(width: int) -> None:
    """All choices and drafts over two tokens, both also none at all (-1), at every verify length."""
    cases = [
        (choice, draft, valid)
        for choice in itertools.product((-1, 0, 1) if width < 3 else (0, 1), repeat=width)
        for draft in itertools.product((-1, 0, 1), repeat=width - 1)
        for valid in range(width)
    ]
    choices, drafts, valid = (torch.tensor([case[i] for case in cases]) for i in range(3))
    drafts = drafts.view(len(cases), width - 1).long()
    clean = RowMap.ragged([width] * len(cases))
    assert_equal(choices.flatten(), clean, drafts, valid)
    # The rule itself, not only the wrapper around it.
    whole = accept(AcceptRule.GREEDY, drafts, valid, target_choice=choices)
    assert torch.equal(greedy_accept_fused(choices.flatten(), clean, drafts, valid).tokens, whole.tokens)


@LAWS
@given(data=st.data(), pad=st.sampled_from([0, -1, 7]), kind=st.sampled_from([torch.int32, torch.int64]))
def test_ragged_and_padded_batches(data, pad, kind) -> None:
    batch, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 17))
    counts = [data.draw(st.integers(1, width)) for _ in range(batch)]
    ragged = data.draw(st.booleans())
    clean = RowMap.ragged(counts) if ragged else RowMap.padded(torch.tensor(counts), width)
    width = clean.width
    valid = torch.tensor([data.draw(st.integers(0, count - 1)) for count in counts], dtype=kind)
    seed = data.draw(st.integers(0, 999))
    random = torch.Generator().manual_seed(seed)
    choices = torch.randint(0, 3, (clean.total,), generator=random)
    # Mostly right drafts, cut from wider rows as the server cuts them.
    padded = torch.nn.functional.pad(clean.pad(choices), (0, 2))
    flips = torch.randint(0, 8, padded.shape, generator=random) == 0
    drafts = torch.where(flips, torch.randint(-1, 4, padded.shape, generator=random), padded)[:, : width - 1]
    assert_equal(choices, clean, drafts, valid, pad)
