"""Slots and places of packed rows, fused and not, and both against a loop."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.kernels import pool_slots
from sglang_ext.kernels.pool_slots import (
    PackedRows,
    Places,
    inline_places,
    inline_places_fused,
    packed_slots,
    packed_slots_fused,
)

LAWS = settings(max_examples=40, deadline=None, print_blob=True)
POSITIONS = 90


@st.composite
def batches(draw):
    """Requests, first positions, pooled and own rows; rows that are only carried along may lie past the table."""
    batch = draw(st.integers(1, 5))
    counts = st.lists(st.integers(0, 70), min_size=batch, max_size=batch)
    first = draw(st.one_of(st.none(), st.lists(st.integers(0, POSITIONS - 1), min_size=batch, max_size=batch)))
    requests = draw(st.permutations(range(8)))[:batch]
    seed = draw(st.integers(0, 999))
    table = torch.randint(0, 10**6, (8, POSITIONS), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    return table, requests, first, draw(counts), draw(counts)


def by_hand(table, requests, first, pooled, own) -> Places:
    slots, pooled_at, own_at, place = [], [], [], 0
    for i, request in enumerate(requests):
        start = 0 if first is None else first[i]
        slots += [int(table[request, min(start + row, POSITIONS - 1)]) for row in range(pooled[i])]
        pooled_at += range(place, place + pooled[i])
        own_at += range(place + pooled[i], place + pooled[i] + own[i])
        place += pooled[i] + own[i]
    return Places(*(torch.tensor(part, dtype=torch.int64) for part in (slots, pooled_at, own_at)))


@LAWS
@given(batch=batches(), size=st.sampled_from([8, 64, 1024]), wide=st.sampled_from([torch.int32, torch.int64]))
def test_one_launch_lays_out_what_many_do(batch, size, wide) -> None:
    table, requests, first, pooled, own = batch
    where = torch.tensor(requests, dtype=wide)
    start = None if first is None else torch.tensor(first)
    rows = PackedRows.of(pooled, own, "cpu")
    expected = by_hand(table, requests, first, pooled, own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_slots, "ROWS", size)
        for found in (inline_places(table, where, start, rows), inline_places_fused(table, where, start, rows)):
            for name in ("slots", "pooled_at", "own_at"):
                part = getattr(found, name)
                assert part.dtype == torch.int64
                assert torch.equal(part, getattr(expected, name)), name
        for slots in (packed_slots(table, where, start, rows), packed_slots_fused(table, where, start, rows)):
            assert slots.dtype == torch.int32
            assert torch.equal(slots.long(), expected.slots)


def test_a_batch_without_rows() -> None:
    rows = PackedRows.of((0, 0), (0, 0), "cpu")
    found = inline_places_fused(torch.zeros(2, 3, dtype=torch.int32), torch.tensor([0, 1]), None, rows)
    assert [part.numel() for part in (found.slots, found.pooled_at, found.own_at)] == [0, 0, 0]


def test_nothing_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_slots, "launch", lambda *arguments, **constants: None)
    table = torch.empty(4, 9, dtype=torch.int32, device="meta")
    requests = torch.empty(2, dtype=torch.int64, device="meta")
    rows = PackedRows.of((3, 4), (2, 0), "meta")
    for first in (None, requests):
        for build in (inline_places, inline_places_fused):
            found = build(table, requests, first, rows)
            assert [part.numel() for part in (found.slots, found.pooled_at, found.own_at)] == [7, 7, 2]
        assert (
            packed_slots_fused(table, requests, first, rows).shape == packed_slots(table, requests, first, rows).shape
        )


def test_one_number_of_each_per_request() -> None:
    with pytest.raises(ValueError, match="one of each per request"):
        PackedRows.of((1, 2), (1,), "cpu")
