"""Laws of core.pass_sizes: a step always fits, padding is bounded, forecasts follow what was seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.core.pass_sizes import REMEMBERED, RowForecast, batch_sizes, row_sizes, smallest_at_least


@given(st.integers(2, 64))
def test_row_sizes_hold_every_step_and_at_most_double_it(block: int) -> None:
    sizes = row_sizes(block)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, block)
    for rows in range(1, block + 1):
        assert rows <= smallest_at_least(sizes, rows) <= max(2 * rows - 1, 1)


@given(st.integers(1, 300))
def test_batch_sizes_hold_every_batch_and_pad_it_by_half_at_most(largest: int) -> None:
    sizes = batch_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, largest)
    for batch in range(1, largest + 1):
        assert batch <= smallest_at_least(sizes, batch) <= 1.5 * batch


def test_what_no_size_holds_is_an_error() -> None:
    with pytest.raises(ValueError, match="9 is above the largest size, 8"):
        smallest_at_least([1, 8], 9)


@given(st.integers(2, 16), st.lists(st.integers(0, 15), max_size=12))
def test_a_forecast_is_the_most_of_the_last_steps(block: int, seen: list[int]) -> None:
    forecast = RowForecast(block)
    assert forecast.rows() == block - 1, "before anything is known every draft has room"
    for drafts in seen:
        forecast.note(drafts)
    if seen:
        assert forecast.rows() == max(seen[-REMEMBERED:])
