"""The drafter's pool in the host's books: tokens cost what both pools take for them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.model_executor import pool_configurator

from sglang_ext.serving import drafter_pool
from sglang_ext.serving.drafter_pool import DrafterPool


class Plain:
    """The host's price of a token, models without sliding windows."""

    def __init__(self, kvc: object) -> None:
        self._cell_size = 1000


class Windowed(Plain):
    """The same with sliding windows, where the host keeps a drafter's part apart."""

    def __init__(self, kvc: object) -> None:
        super().__init__(kvc)
        self._draft_cell_size = 0


@pytest.fixture
def charged(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A drafter pool is charged for; the host's own prices are made up."""
    monkeypatch.setattr(pool_configurator, "is_deepseek_v4", lambda config: False)
    monkeypatch.setattr(pool_configurator, "DefaultPoolConfigurator", Plain)
    monkeypatch.setattr(pool_configurator, "HybridSWAPoolConfigurator", Windowed)
    monkeypatch.setattr(pool_configurator.SWARequestCapPoolConfigurator, "is_applicable", lambda kvc: False)
    drafter_pool.charge(250)
    yield 250
    drafter_pool.charge(0)


@pytest.mark.parametrize("windowed", (False, True))
@pytest.mark.parametrize("is_draft_worker", (False, True))
def test_the_host_prices_a_token_with_the_drafters_part(charged: int, windowed: bool, is_draft_worker: bool) -> None:
    kvc = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=None), is_hybrid_swa=windowed, is_draft_worker=is_draft_worker
    )
    price = pool_configurator.create_memory_pool_configurator(kvc)
    added = 0 if is_draft_worker else charged
    assert price._cell_size == 1000 + added
    if windowed:
        assert price._draft_cell_size == added


def test_the_pool_takes_the_bytes_it_says() -> None:
    pool = DrafterPool(3, 2, 16, torch.bfloat16, "cpu")
    assert pool.bytes == 0 == pool.slots
    pool.allocate(101)
    held = [pool.get_key_buffer(layer) for layer in range(3)] + [pool.get_value_buffer(layer) for layer in range(3)]
    assert pool.bytes == 101 * pool.bytes_per_token == sum(part.numel() * part.element_size() for part in held)


def test_a_token_is_read_back_from_its_slot_alone() -> None:
    pool = DrafterPool(2, 1, 4, torch.float32, "cpu")
    pool.allocate(9)
    keys, values = torch.randn(2, 2, 3, 1, 4, generator=torch.Generator().manual_seed(3))
    slots = torch.tensor([7, 1, 4])
    pool.write(slots, keys, values)
    for layer in range(2):
        assert torch.equal(pool.get_key_buffer(layer)[slots], keys[layer])
        assert torch.equal(pool.get_value_buffer(layer)[slots], values[layer])
        untouched = [slot for slot in range(9) if slot not in (7, 1, 4)]
        assert not pool.get_key_buffer(layer)[untouched].any() and not pool.get_value_buffer(layer)[untouched].any()
