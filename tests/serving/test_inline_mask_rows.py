"""Laws of mask rows on the CPU backend: pooled keys up to the anchor, own group inline, nothing else."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core.block import BlockLayout
from sglang_ext.serving.attention.harness import AttentionShape, Harness
from sglang_ext.serving.attention.inline import SdpaMaskRows
from sglang_ext.serving.attention.mask_rows import MaskRowAttention
from sglang_ext.serving.attention.sdpa import SdpaBackend

GQA = AttentionShape(heads=6, kv_heads=2, head_dim=16, dtype=torch.float32)
MHA = AttentionShape(heads=2, kv_heads=2, head_dim=8, dtype=torch.float32)
LAWS = settings(max_examples=30, deadline=None, print_blob=True)


@st.composite
def passes(draw):
    """A parallel pass: committed lengths, clean rows and groups per request, block size."""
    batch = draw(st.integers(1, 3))
    committed = [draw(st.integers(0, 90)) for _ in range(batch)]
    widths = [draw(st.integers(1, 5)) for _ in range(batch)]
    groups = [draw(st.integers(0, width)) for width in widths]
    groups[0] = max(groups[0], 1)
    return committed, widths, groups, draw(st.integers(1, 5))


def mask_tensors(harness, layout):
    shape = harness.shape
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    return [torch.randn(layout.mask.total, count, shape.head_dim, generator=harness.random) for count in heads]


def reference(harness, anchors, block, tensors):
    """One row at a time in float64; ``anchors[b]`` lists request b's groups."""
    q, k, v = (part.double() for part in tensors)
    shape, out, row = harness.shape, [], 0
    for request, groups in zip(harness.requests, anchors, strict=True):
        for anchor in groups:
            slots = harness.table[request, : anchor + 1].long()
            own = slice(row - row % block, row - row % block + block)
            keys = torch.cat([harness.pool.keys[slots].double(), k[own]])
            values = torch.cat([harness.pool.values[slots].double(), v[own]])
            for _ in range(block):
                found = []
                for head in range(shape.heads):
                    shared = head * shape.kv_heads // shape.heads
                    scores = [float(q[row, head] @ key) / math.sqrt(shape.head_dim) for key in keys[:, shared]]
                    weights = torch.tensor([math.exp(score - max(scores)) for score in scores], dtype=torch.float64)
                    found.append((weights[:, None] * values[:, shared]).sum(0) / weights.sum())
                out.append(torch.cat(found))
                row += 1
    return torch.stack(out)


def verified_backend(harness, widths):
    """A backend in the middle of a verification: its clean rows are pooled and attended in layer 0."""
    backend = SdpaBackend(harness.runner)
    spec = SimpleNamespace(verify_lens_cpu=widths, draft_token_num=max(widths), custom_mask=None)
    batch = harness.batch("verify", widths, spec)
    backend.init_forward_metadata(batch)
    query = harness.queries(widths)
    clean = backend.forward_extend(query, *harness.new_rows(widths), harness.layer(), batch)
    harness.runner.attn_backend = backend
    return backend, lambda: (backend.forward_extend(query, *harness.new_rows(widths), harness.layer(), batch), clean)


@LAWS
@given(shape=st.sampled_from([GQA, MHA]), spec=passes(), page=st.sampled_from([1, 16]), seed=st.integers(0, 999))
def test_mask_rows_beside_verify_rows_see_their_anchor_and_their_group(shape, spec, page, seed):
    committed, widths, groups, block = spec
    lengths = [n + width for n, width in zip(committed, widths, strict=True)]
    harness = Harness(shape, lengths, page_size=page, seed=seed)
    layout = BlockLayout.ragged(committed, widths, groups, block)
    _, again = verified_backend(harness, widths)
    rows = SdpaMaskRows(harness.runner)
    meta = rows.prepare(harness.requests, layout, max(lengths))
    tensors = mask_tensors(harness, layout)
    anchors = [[n + group for group in range(count)] for n, count in zip(committed, groups, strict=True)]
    expected = reference(harness, anchors, block, tensors)
    found = rows.attend(harness.layer(), *tensors, meta)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(*again(), atol=0, rtol=0)


@LAWS
@given(shape=st.sampled_from([GQA, MHA]), lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
       block=st.integers(1, 9), seed=st.integers(0, 999))  # fmt: skip
def test_mask_rows_alone_see_the_committed_tokens(shape, lengths, block, seed):
    harness = Harness(shape, lengths, seed=seed)
    harness.runner.attn_backend = SdpaBackend(harness.runner)
    layout = BlockLayout.sequential(torch.tensor(lengths), block)
    rows = SdpaMaskRows(harness.runner)
    tensors = mask_tensors(harness, layout)
    expected = reference(harness, [[length - 1] for length in lengths], block, tensors)
    found = rows.attend(harness.layer(), *tensors, rows.prepare(harness.requests, layout, max(lengths)))
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


@LAWS
@given(shape=st.sampled_from([GQA, MHA]), spec=passes(), seed=st.integers(0, 999))
def test_the_cpu_form_equals_the_device_independent_form(shape, spec, seed):
    committed, widths, groups, block = spec
    lengths = [n + width for n, width in zip(committed, widths, strict=True)]
    harness = Harness(shape, lengths, seed=seed)
    layout = BlockLayout.ragged(committed, widths, groups, block)
    verified_backend(harness, widths)
    tensors = mask_tensors(harness, layout)
    cpu = SdpaMaskRows(harness.runner)
    plain = MaskRowAttention(harness.runner, shape.heads // shape.kv_heads)
    found = cpu.attend(harness.layer(), *tensors, cpu.prepare(harness.requests, layout, max(lengths)))
    expected = plain.attend(harness.layer(), *tensors, plain.prepare(harness.requests, layout, max(lengths)))
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_a_layer_gathered_for_verify_rows_is_not_gathered_again_but_other_layers_are():
    harness = Harness(GQA, [40], seed=5)
    backend, _ = verified_backend(harness, [4])
    layout = BlockLayout.ragged([36], [4], [2], 3)
    rows = SdpaMaskRows(harness.runner)
    meta = rows.prepare(harness.requests, layout, 40)
    tensors = mask_tensors(harness, layout)
    first = rows.attend(harness.layer(layer_id=0), *tensors, meta)
    assert meta.plan.gather is backend.plan.groups[0].gather
    harness.pool.keys.zero_()
    assert torch.equal(rows.attend(harness.layer(layer_id=0), *tensors, meta), first)
    assert not torch.equal(rows.attend(harness.layer(layer_id=1), *tensors, meta), first)
