"""The chunked cross-entropy equals the textbook one; random candidates leave its normaliser unbiased."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sglang_ext.models import loss as loss_module
from sglang_ext.models.loss import candidate_cross_entropy, draw_candidates, leading_matches, slot_weights

ROWS, HIDDEN, RANK, VOCABULARY = 37, 12, 5, 53


@pytest.mark.parametrize("form", ["hidden", "vocabulary"])
def test_equals_autograd_over_the_whole_vocabulary(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", 8)
    torch.manual_seed(0)
    hidden, low = torch.randn(ROWS, HIDDEN, requires_grad=True), torch.randn(ROWS, RANK, requires_grad=True)
    head = torch.randn(VOCABULARY, HIDDEN)
    low_weight, bias = torch.randn(VOCABULARY, RANK, requires_grad=True), torch.randn(VOCABULARY, requires_grad=True)
    labels, weights = torch.randint(VOCABULARY, (ROWS,)), torch.rand(ROWS)
    inputs = [hidden, bias, low, low_weight] if form == "vocabulary" else [hidden, bias]
    extra = (low, low_weight) if form == "vocabulary" else (None, None)
    ours, losses, correct = candidate_cross_entropy(hidden, head, bias, labels, weights, *extra)
    found = torch.autograd.grad(3 * ours, inputs)
    logits = hidden @ head.t() + bias + (low @ low_weight.t() if form == "vocabulary" else 0)
    expected = F.cross_entropy(logits, labels, reduction="none")
    wanted = torch.autograd.grad(3 * (expected * weights).sum(), inputs)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(ours.detach(), (expected * weights).sum().detach())
    assert torch.equal(correct, logits.argmax(-1) == labels)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_candidates_hold_every_label_and_each_certain_token_once() -> None:
    frequent, labels = torch.tensor([3, 7, 11]), torch.tensor([7, 50, 3, 21, 50])
    candidates = draw_candidates(frequent, 10, labels, VOCABULARY, seed=4)
    assert torch.equal(candidates.ids[candidates.index(labels)], labels)
    certain = candidates.ids[candidates.correction == 0].tolist()
    assert sorted(certain) == [3, 7, 11, 21, 50]
    assert not set(candidates.ids[candidates.correction != 0].tolist()) & set(certain)
    again = draw_candidates(frequent, 10, labels, VOCABULARY, seed=4)
    assert torch.equal(candidates.ids, again.ids)


def test_whole_vocabulary_when_everything_is_drawn() -> None:
    labels = torch.tensor([1, 2])
    candidates = draw_candidates(torch.tensor([0]), VOCABULARY, labels, VOCABULARY, seed=0)
    assert sorted(candidates.ids.tolist()) == list(range(VOCABULARY)) and not candidates.correction.any()
    assert torch.equal(candidates.ids[candidates.index(torch.arange(VOCABULARY))], torch.arange(VOCABULARY))


def test_drawn_candidates_leave_the_normaliser_unbiased() -> None:
    torch.manual_seed(1)
    logits, labels = torch.randn(VOCABULARY), torch.tensor([30])
    frequent = torch.arange(5)
    sums = []
    for seed in range(2000):
        candidates = draw_candidates(frequent, 8, labels, VOCABULARY, seed)
        sums.append((logits[candidates.ids] + candidates.correction).exp().sum())
    mean, exact = torch.stack(sums).mean(), logits.exp().sum()
    spread = torch.stack(sums).std() / len(sums) ** 0.5
    assert abs(mean - exact) < 4 * spread, f"seeds 0..1999: {mean} against {exact}, standard error {spread}"


def test_slot_weights_and_leading_matches() -> None:
    torch.testing.assert_close(slot_weights(4, 2.0), torch.tensor([1.0, 2.718281828**-0.5, 2.718281828**-1.0]))
    correct = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    valid = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
    assert leading_matches(correct, valid).tolist() == [2, 0, 2]
