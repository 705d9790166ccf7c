"""Laws of core.sampling: the distribution is the host sampler's own, and draws follow it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_ext.core.sampling import SamplingParams, sample, target_probs

SEED = 20260520
ROWS = [  # temperature, top_k, top_p, min_p
    (1.0, -1, 1.0, 0.0),
    (0.7, -1, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.3, -1, 0.9, 0.0),
    (1.0, -1, 1e-4, 0.0),
    (1.0, -1, 1.0, 0.1),
    (1.0, -1, 1.0, 1.0),
    (0.8, 20, 0.8, 0.05),
    (2.0, 50, 0.5, 0.02),
    (1.0, 1, 1.0, 0.0),
    (1.0, 1 << 30, 0.95, 0.0),
    (5.0, -1, 0.999, 0.0),
]


def columns(rows: list[tuple[float, int, float, float]]) -> SamplingParams:
    return SamplingParams.from_lists(*[list(column) for column in zip(*rows, strict=True)])


def host_distribution(logits: Tensor, rows: list[tuple[float, int, float, float]]) -> Tensor:
    """What the installed SGLang sampler draws from, read out of the sampler itself."""
    sampler = pytest.importorskip("sglang.srt.layers.sampler")
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    probs = torch.softmax(logits / torch.tensor(temperature).unsqueeze(-1), dim=-1)
    host_top_k = [k if k > 0 else 1 << 30 for k in top_k]  # as SamplingParams of the host normalises it
    _, weights, token, _ = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
        probs,
        torch.tensor(host_top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(min_p),
        any(p > 0 for p in min_p),
        None,
        torch.zeros(len(rows), dtype=torch.int64),
        return_filtered_probs=True,
    )
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.zeros_like(logits).scatter_(-1, token.long(), weights)


@pytest.mark.parametrize("vocabulary", [8, 100, 3000, 49152])
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_support_and_probabilities_are_the_hosts(vocabulary: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(SEED)
    logits = torch.randn(len(ROWS), vocabulary, generator=generator) * scale
    expected = host_distribution(logits, ROWS)
    got = target_probs(logits, columns(ROWS))
    for i, (_, _, top_p, _) in enumerate(ROWS):
        if top_p < 1:
            assert torch.equal(got[i] > 0, expected[i] > 0), f"row {ROWS[i]}, seed {SEED}"
        else:  # the host compares a rounded running sum with 1 and may lose the last few units of rounding
            assert not ((expected[i] > 0) & (got[i] == 0)).any(), f"row {ROWS[i]}, seed {SEED}"
            assert got[i][expected[i] == 0].sum() < 2e-5, f"row {ROWS[i]}, seed {SEED}"
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-7)
    for i, row in enumerate(ROWS):  # each alone takes its own short cuts and must not change
        alone = target_probs(logits[i : i + 1], columns([row]))
        torch.testing.assert_close(alone, got[i : i + 1], rtol=1e-5, atol=0)
        assert torch.equal(alone > 0, got[i : i + 1] > 0), f"row {row}, seed {SEED}"


def test_host_draws_follow_our_distribution() -> None:
    """200k draws of the host's function fall on our support with our frequencies (chi-square)."""
    sampler = pytest.importorskip("sglang.srt.layers.sampler")
    draws, row = 200_000, (0.9, 6, 0.9, 0.05)
    torch.manual_seed(SEED)
    logits = torch.randn(1, 8) * 1.5
    ours = target_probs(logits, columns([row]))[0].double()
    probs = torch.softmax(logits / row[0], -1).repeat(draws, 1)
    fill = torch.ones(draws)
    ids = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
        probs, (fill * row[1]).int(), fill * row[2], fill * row[3], True, None, torch.zeros(draws), max_top_k=6
    )
    counts = torch.bincount(ids.long(), minlength=8).double()
    kept = ours > 0
    assert counts[~kept].sum() == 0
    statistic = ((counts - draws * ours)[kept] ** 2 / (draws * ours[kept])).sum()
    p_value = torch.special.gammaincc((kept.sum() - 1) / 2, (statistic / 2).float())
    assert p_value > 0.001, f"p = {p_value:.2e}, seed {SEED}"


def test_params_are_not_mistaken_for_a_short_cut() -> None:
    """Flags left at their cautious defaults give the same distribution as the derived ones."""
    generator = torch.Generator().manual_seed(SEED)
    logits = torch.randn(len(ROWS), 2000, generator=generator)
    derived = columns(ROWS)
    cautious = SamplingParams(derived.temperature, derived.top_k, derived.top_p, derived.min_p)
    assert torch.equal(target_probs(logits, derived), target_probs(logits, cautious))


@pytest.mark.parametrize("row", [(0.0, -1, 1.0, 0.0), (0.0, 7, 0.3, 0.2), (1.0, 1, 1.0, 0.0), (1.7, 1, 0.5, 0.3)])
def test_greedy_rows_are_one_hot_at_the_first_argmax(row: tuple[float, int, float, float]) -> None:
    logits = torch.tensor([[0.0, 3.0, -1.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    params = columns([row, row])
    assert params.is_greedy.all()
    expected = torch.tensor([[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert torch.equal(target_probs(logits, params), expected)


@pytest.mark.parametrize("row", [(1.0, -1, 1e-4, 0.0), (1.0, -1, 1.0, 1.0), (1.0, 1, 1.0, 0.0)])
def test_degenerate_filters_equal_greedy(row: tuple[float, int, float, float]) -> None:
    logits = torch.randn(16, 500, generator=torch.Generator().manual_seed(SEED))
    probs = target_probs(logits, columns([row] * 16))
    assert torch.equal(probs.argmax(-1), logits.argmax(-1))
    assert torch.equal((probs > 0).sum(-1), torch.ones(16, dtype=torch.int64)), f"seed {SEED}"


def test_input_is_left_alone_and_rows_repeat() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(SEED))
    before = logits.clone()
    params = columns([(0.0, -1, 1.0, 0.0), (0.5, 3, 0.9, 0.0)])
    request = torch.tensor([0, 0, 1, 1, 1])
    probs = target_probs(logits[request], params.rows(request))
    assert torch.equal(logits, before)
    assert torch.equal(probs, target_probs(logits, params)[request])


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_token_without_mass_is_never_drawn(data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 0.3, 1.0]), min_size=1, max_size=12))
    if sum(weights) == 0:
        weights[0] = 1.0
    uniform = data.draw(st.sampled_from([0.0, 1e-16, 0.5, 1 - 2**-53]))
    probs = torch.tensor([weights])
    token = sample(probs, uniform=torch.tensor([uniform], dtype=torch.float64))
    assert probs[0, token[0]] > 0


def test_draws_follow_unnormalised_weights() -> None:
    weights = torch.tensor([0.0, 2.0, 1.0, 0.0, 5.0, 0.0])
    draws = sample(weights.expand(200_000, 6), torch.Generator().manual_seed(SEED))
    counts = torch.bincount(draws, minlength=6).double()
    expected = weights.double() / weights.sum() * 200_000
    kept = expected > 0
    assert counts[~kept].sum() == 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    p_value = torch.special.gammaincc(torch.tensor(1.0), (statistic / 2).float())
    assert p_value > 0.001, f"p = {p_value:.2e}, seed {SEED}"


@pytest.mark.parametrize("max_top_k", [None, 7])
def test_off_the_cpu_nothing_is_read_back(max_top_k: int | None) -> None:
    """On the meta device every read of a value, and every shape that depends on one, is an error."""
    number, integer = torch.empty(3, device="meta"), torch.empty(3, dtype=torch.int64, device="meta")
    params = SamplingParams(number, integer, number, number, max_top_k=max_top_k)
    probs = target_probs(
        torch.empty(5, 5000, device="meta"), params.rows(torch.empty(5, dtype=torch.int64, device="meta"))
    )
    assert probs.shape == (5, 5000)
    assert sample(probs).shape == (5,)
