"""A drafter's own blocks through FlashInfer's twin: the same drafts as over the CPU backend."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("sglang")

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.core.block import BlockLayout
from sglang_ext.models.tapped.checkpoint import expected_shapes
from sglang_ext.serving.attention.flashinfer import FORMS
from sglang_ext.serving.attention.flashinfer_calls import HeadShape, Kernels
from sglang_ext.serving.attention.flashinfer_twin import TwinLibrary
from sglang_ext.serving.drafters.dflare import PADDING_SLOT
from sglang_ext.serving.drafters.dflare_attention import block_attention
from sglang_ext.serving.taps import Taps
from tests.serving.test_dflare_drafter import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAWS, Bench, config, tensors

SHAPE = HeadShape(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, torch.float32, torch.float32)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def bench_of(lengths: list[int], seed: int, depth: int, block: int) -> Bench:
    """A drafter whose context is written, over the CPU backend."""
    random = torch.Generator().manual_seed(seed)
    drafter = config(depth, 2, True, True, block)
    bench = Bench(drafter, tensors(expected_shapes(drafter), random), lengths, seed)
    for request, length in enumerate(lengths):
        states = [torch.randn(length, HIDDEN, generator=random) for _ in range(2)]
        bench.read(request, states, 0, length)
    return bench


@LAWS
@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=4),
    depth=st.integers(1, 2),
    block=st.integers(2, 7),
    seed=st.integers(0, 999),
    form=st.sampled_from(sorted(FORMS)),
)
def test_blocks_are_those_of_the_cpu_backend(lengths, depth, block, seed, form):
    bench = bench_of(lengths, seed, depth, block)
    context = replace(bench.context(), host_lengths=lengths)
    expected = bench.drafter.block_logits(context)
    library = TwinLibrary()
    bench.runner.device = "twin"
    bench.drafter._attention = block_attention(
        bench.runner, bench.pool, lambda source: FORMS[form](source, Kernels(library, "cpu", 64), SHAPE)
    )
    torch.testing.assert_close(bench.drafter.block_logits(context), expected, atol=1e-4, rtol=1e-4)
    assert len(library.plans) == (2 if form == "merged" else 1), "planned once, whatever the depth"
    chosen = context.select(torch.tensor([len(lengths) - 1]), [len(lengths) - 1])
    torch.testing.assert_close(bench.drafter.block_logits(chosen), expected[-1:], atol=1e-4, rtol=1e-4)


@LAWS
@given(seed=st.integers(0, 999), data=st.data())
def test_committing_writes_the_kept_rows_and_reads_nothing_back(seed, data):
    """Rejected rows go to the padding slot: the rest of the pool is what the CPU's way makes of it."""
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
    bench = bench_of(lengths, seed, 1, 4)
    widths = [data.draw(st.integers(1, 3)) for _ in lengths]
    accepted = torch.tensor([data.draw(st.integers(0, width - 1)) for width in widths])
    layout = BlockLayout.ragged(lengths, widths, [0] * len(lengths), 4)
    states = [torch.randn(sum(widths), HIDDEN, generator=bench.random) for _ in range(2)]
    taps = Taps(states, layout.clean_position, torch.arange(sum(widths)) + bench.pool.slots - sum(widths))
    whole = bench.pool.get_key_buffer(0).clone()
    bench.taps.next = taps
    bench.drafter.observe_commit(layout, accepted)
    expected = bench.pool.get_key_buffer(0).clone()
    bench.pool._keys[0] = whole
    kept = layout.clean.column <= accepted[layout.clean.request]
    bench.taps.next = taps
    bench.drafter._drop_rejected = False
    bench.drafter.observe_commit(layout, accepted)
    found = bench.pool.get_key_buffer(0)
    # Products over other row counts round differently.
    torch.testing.assert_close(found[PADDING_SLOT + 1 :], expected[PADDING_SLOT + 1 :], atol=1e-5, rtol=1e-5)
    assert torch.equal(found[taps.slots[~kept]], whole[taps.slots[~kept]])

    count = torch.empty(len(lengths), dtype=torch.int64, device="meta")
    elsewhere = BlockLayout.uniform(count, 3, 0, 4, host_committed=lengths)
    written = []
    slots = torch.empty(elsewhere.clean.total, dtype=torch.int64, device="meta")
    bench.taps.next = Taps([], elsewhere.clean_position, slots)
    bench.drafter._remember = written.append
    bench.drafter.observe_commit(elsewhere, count)
    assert written[0].slots.shape == slots.shape
