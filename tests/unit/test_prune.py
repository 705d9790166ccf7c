"""Laws of core.prune: FlexDraft section 4, checked against the sentences spelled out in Python."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core.prune import PruneConfig, PruneStrategy, expected_accept, group_probability, verify_lengths
from sglang_ext.core.refusal import Refusal

confidences = st.integers(1, 15).flatmap(
    lambda drafts: st.lists(
        st.lists(st.floats(0, 1, width=32), min_size=drafts, max_size=drafts), min_size=1, max_size=5
    )
)


def brute_length(row: list[float], config: PruneConfig) -> int:
    if config.strategy is PruneStrategy.NONE:
        length = len(row)
    elif config.strategy is PruneStrategy.CUMULATIVE_PRODUCT:
        products = list(itertools.accumulate(torch.tensor(row), lambda product, m: product * m))
        length = next((j for j, product in enumerate(products) if product < config.threshold), len(row))
    else:
        length = next((j for j, m in enumerate(torch.tensor(row)) if m < config.threshold), len(row))
    most = len(row) if config.max_drafts is None else min(len(row), config.max_drafts)
    return max(min(length, most), min(config.min_drafts, most))


@settings(deadline=None, max_examples=200)
@given(
    confidences,
    st.sampled_from(list(PruneStrategy)),
    st.sampled_from([0.0, 0.01, 0.25, 0.5, 1.0]),
    st.integers(0, 3),
    st.sampled_from([None, 3, 8]),
)
def test_verify_length_is_the_papers_rule(
    rows: list[list[float]], strategy: PruneStrategy, threshold: float, least: int, most: int | None
) -> None:
    config = PruneConfig(strategy, threshold, least, most)
    lengths = verify_lengths(torch.tensor(rows), config)
    assert lengths.dtype == torch.int64
    assert lengths.tolist() == [brute_length(row, config) for row in rows]


def test_defaults_are_the_papers() -> None:
    config = PruneConfig()
    assert (config.strategy, config.threshold, config.min_drafts) == (PruneStrategy.CUMULATIVE_PRODUCT, 0.01, 1)
    m = torch.tensor([[0.9, 0.2, 0.1, 0.1], [0.001, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    assert verify_lengths(m, config).tolist() == [3, 1, 4]
    assert verify_lengths(m, PruneConfig("min_confidence", 0.15)).tolist() == [2, 1, 4]  # type: ignore[arg-type]


def test_nan_ends_the_run() -> None:
    m = torch.tensor([[0.9, math.nan, 0.9], [math.nan, 0.9, 0.9]])
    for strategy in (PruneStrategy.CUMULATIVE_PRODUCT, PruneStrategy.MIN_CONFIDENCE):
        assert verify_lengths(m, PruneConfig(strategy, min_drafts=0)).tolist() == [1, 0]


@settings(deadline=None, max_examples=100)
@given(confidences, st.integers(0, 15))
def test_group_probability_is_a_distribution_whose_mean_is_the_expected_length(
    rows: list[list[float]], length: int
) -> None:
    m = torch.tensor(rows, dtype=torch.float64)
    v = torch.full((len(rows),), min(length, m.shape[1]))
    probability = group_probability(m, v)
    assert probability.shape == (len(rows), m.shape[1] + 1)
    torch.testing.assert_close(probability.sum(-1), torch.ones(len(rows), dtype=torch.float64))
    kept = torch.arange(m.shape[1] + 1, dtype=torch.float64)
    torch.testing.assert_close(1 + (probability * kept).sum(-1), expected_accept(m, v))
    assert (probability[:, min(length, m.shape[1]) + 1 :] == 0).all()


def test_group_probability_by_hand() -> None:
    m = torch.tensor([[0.5, 0.2]], dtype=torch.float64)
    torch.testing.assert_close(group_probability(m), torch.tensor([[0.5, 0.4, 0.1]], dtype=torch.float64))
    assert group_probability(torch.zeros(3, 0)).tolist() == [[1.0]] * 3
    assert expected_accept(torch.zeros(3, 0), torch.zeros(3)).tolist() == [1.0] * 3


def test_simulated_acceptance_has_the_predicted_law() -> None:
    """If slot j is accepted with probability m_j, the mean committed length is expected_accept."""
    seed, draws = 7, 200_000
    m = torch.tensor([[0.9, 0.6, 0.7, 0.3]], dtype=torch.float64)
    hits = torch.rand(draws, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) < m
    accepted = hits.long().cumprod(-1).sum(-1)
    expected = group_probability(m)[0] * draws
    counts = torch.bincount(accepted, minlength=5).double()
    statistic = ((counts - expected) ** 2 / expected).sum()
    p_value = torch.special.gammaincc(torch.tensor(2.0), (statistic / 2).float())
    assert p_value > 0.001, f"p = {p_value:.2e}, seed {seed}"


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"strategy": "cumulative_produkt"}, "did you mean 'cumulative_product'"),
        ({"threshold": 1.5}, "threshold 1.5"),
        ({"threshold": math.nan}, "threshold nan"),
        ({"min_drafts": -1}, "min_drafts=-1"),
        ({"min_drafts": 4, "max_drafts": 2}, "max_drafts=2"),
    ],
)
def test_bad_values_are_refused_by_name(kwargs: dict[str, object], named: str) -> None:
    with pytest.raises(Refusal, match=named):
        PruneConfig(**kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", list(PruneStrategy))
def test_nothing_is_read_back(strategy: PruneStrategy) -> None:
    """On the meta device every read of a value, and every shape that depends on one, is an error."""
    m = torch.empty(3, 7, device="meta")
    length = verify_lengths(m, PruneConfig(strategy))
    assert length.shape == expected_accept(m, length).shape == (3,)
    assert group_probability(m, length).shape == (3, 8)
