"""Drafts and confidences from logits, fused and not, overflowed numbers included."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.kernels import draft_choice as module
from sglang_ext.kernels.draft_choice import draft_choice, draft_choice_fused

LAWS = settings(max_examples=60, deadline=None, print_blob=True)
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, 1.0, -3.0, 3e38, -3e38]


def assert_equal(logits: torch.Tensor, listed: torch.Tensor | None = None) -> None:
    """Tokens to the last one; confidences to the twin's rounding, and to what float64 says."""
    expected, found = draft_choice(logits, listed), draft_choice_fused(logits, listed)
    assert torch.equal(found[0], expected[0])
    assert (found[0].dtype, found[1].dtype) == (torch.int64, torch.float32)
    exact = torch.where(found[0] < 0, 0.0, logits.double().softmax(-1).amax(-1)).float()
    torch.testing.assert_close(found[1], exact, rtol=2e-5, atol=0)
    # The twin subtracts two numbers as large as the largest logit; the kernel divides 1 by the sum it keeps.
    ordinary = (logits.amax(-1).abs() < 1e3) | (found[0] < 0)
    torch.testing.assert_close(found[1][ordinary], expected[1][ordinary], rtol=5e-4, atol=0)


@LAWS
@given(
    batch=st.integers(1, 2), slots=st.integers(1, 3), count=st.integers(1, 300), seed=st.integers(0, 9999),
    scale=st.sampled_from([0.0, 0.1, 3.0, 100.0, 1e30]), listed=st.booleans(), block=st.sampled_from([16, 64, 4096]),
)  # fmt: skip
def test_every_size_and_scale(batch, slots, count, seed, scale, listed, block) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, slots, count, generator=random) * scale
    ids = torch.randperm(10 * count, generator=random)[:count] if listed else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        assert_equal(logits, ids)


@LAWS
@given(
    values=st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=40),
    listed=st.booleans(),
)
def test_numbers_that_have_overflowed(values, listed) -> None:
    """A row with NaN or +inf, or with nothing but -inf, drafts nothing; -inf among numbers is a token ruled out."""
    logits = torch.tensor(values).view(1, 1, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 16)
        assert_equal(logits, torch.arange(len(values)) + 1000 if listed else None)
        broken = any(math.isnan(value) or value == math.inf for value in values) or set(values) == {-math.inf}
        token, confidence = draft_choice_fused(logits)
    assert (int(token) == -1) == broken
    assert (float(confidence) == 0.0) == broken


def test_equal_logits_choose_the_first() -> None:
    logits = torch.tensor([[[1.0] * 50, [0.0] * 20 + [2.0] * 30, [0.0] * 49 + [2.0]]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 16)
        assert draft_choice_fused(logits)[0].tolist() == [[0, 20, 49]]
    assert_equal(logits)
