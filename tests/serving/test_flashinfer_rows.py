"""Laws of mask rows through FlashInfer, proved over its torch twin: what a kernel would read is what the rule says."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core.block import BlockLayout, mask_rows_mask
from sglang_ext.core.mask_bits import Rows, pack
from sglang_ext.serving.attention.flashinfer import FORMS, InlineKeys, MergedMaskRows, slots_of
from sglang_ext.serving.attention.flashinfer_calls import HeadShape, Kernels, MaskMode
from sglang_ext.serving.attention.flashinfer_twin import TwinLibrary
from sglang_ext.serving.attention.harness import AttentionShape, Harness
from sglang_ext.serving.attention.inline import SdpaMaskRows
from sglang_ext.serving.attention.sdpa import SdpaBackend

GQA = AttentionShape(heads=6, kv_heads=2, head_dim=16, dtype=torch.float32)
MHA = AttentionShape(heads=2, kv_heads=2, head_dim=8, dtype=torch.float32)
WIDE = AttentionShape(heads=8, kv_heads=2, head_dim=128, dtype=torch.float32)
SMALL = AttentionShape(heads=4, kv_heads=1, head_dim=64, dtype=torch.float32)
SHAPES = st.sampled_from([GQA, MHA, WIDE, SMALL])
LAWS = settings(max_examples=40, deadline=None, print_blob=True)
EXACT = {"atol": 4e-6, "rtol": 1e-5}


@st.composite
def passes(draw, longest: int = 150):
    """Committed lengths, clean rows and groups per request, block size; some requests bring no group."""
    batch = draw(st.integers(1, 4))
    committed = [draw(st.integers(1, longest)) for _ in range(batch)]
    widths = [draw(st.integers(0, 6)) for _ in range(batch)]
    groups = [draw(st.integers(0, max(width, 1))) for width in widths]
    groups[0] = max(groups[0], 1)
    return committed, widths, groups, draw(st.integers(1, 6))


def head_shape(shape: AttentionShape, kv_dtype: torch.dtype | None = None) -> HeadShape:
    own = shape.dtype
    return HeadShape(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5, own, kv_dtype or own)


def make(form: str, harness: Harness, source=None, kv_dtype=None):
    library = TwinLibrary()
    kernels = Kernels(library, "cpu", 1024)
    return FORMS[form](source or harness.runner, kernels, head_shape(harness.shape, kv_dtype)), library


def row_tensors(harness: Harness, layout: BlockLayout) -> list[torch.Tensor]:
    shape = harness.shape
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    return [
        torch.randn(layout.mask.total, count, shape.head_dim, generator=harness.random).to(shape.dtype)
        for count in heads
    ]


def oracle(harness: Harness, layout: BlockLayout, rows, pools=None, sinks=None) -> torch.Tensor:
    """Dense attention in float64 under the boolean mask of the layout, one request at a time."""
    q, k, v = (layout.mask.pad(part.double()) for part in rows)
    lengths = [n + w for n, w in zip(layout.host_committed, layout.clean.carried)]
    keys = max(lengths)
    seen = mask_rows_mask(layout, keys)
    pool_k, pool_v = (part.double() for part in (pools or (harness.pool.keys, harness.pool.values)))
    group = harness.shape.heads // harness.shape.kv_heads
    outs = []
    for i, length in enumerate(lengths):
        slots = harness.table[harness.requests[i], :length].long()
        own_k = torch.cat([pool_k[slots], k[i]]).repeat_interleave(group, 1)
        own_v = torch.cat([pool_v[slots], v[i]]).repeat_interleave(group, 1)
        mask = torch.cat([seen[i][:, :length], seen[i][:, keys:]], 1)
        scores = torch.einsum("qhd,shd->qhs", q[i], own_k) / math.sqrt(harness.shape.head_dim)
        scores = scores.masked_fill(~mask[:, None], -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(1, -1, 1).expand(*scores.shape[:2], 1)], -1)
        weights = scores.softmax(-1)[..., : own_k.shape[0]]
        outs.append(torch.einsum("qhs,shd->qhd", weights, own_v).flatten(1))
    return layout.mask.flatten(torch.stack(outs))


def build(shape: AttentionShape, spec, seed: int, page: int = 1):
    committed, widths, groups, block = spec
    harness = Harness(shape, [n + w for n, w in zip(committed, widths)], page_size=page, seed=seed)
    return harness, BlockLayout.ragged(committed, widths, groups, block)


# ---- numbers --------------------------------------------------------------------------------------------------------


@LAWS
@given(form=st.sampled_from(sorted(FORMS)), shape=SHAPES, spec=passes(), page=st.sampled_from([1, 4, 16, 64]),
       seed=st.integers(0, 999))  # fmt: skip
def test_a_pass_equals_the_dense_oracle(form, shape, spec, page, seed):
    harness, layout = build(shape, spec, seed, page)
    rows, _ = make(form, harness)
    tensors = row_tensors(harness, layout)
    meta = rows.prepare(harness.requests, layout, 0)
    for _ in range(2):
        found = rows.attend(harness.layer(), *tensors, meta)
        torch.testing.assert_close(found.double(), oracle(harness, layout, tensors), **EXACT)


@LAWS
@given(form=st.sampled_from(sorted(FORMS)), shape=SHAPES, seed=st.integers(0, 999), block=st.integers(1, 9),
       lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4))  # fmt: skip
def test_a_block_alone_equals_the_dense_oracle(form, shape, seed, block, lengths):
    harness = Harness(shape, lengths, seed=seed)
    layout = BlockLayout.sequential(torch.tensor(lengths), block, lengths)
    rows, library = make(form, harness)
    tensors = row_tensors(harness, layout)
    found = rows.attend(harness.layer(), *tensors, rows.prepare(harness.requests, layout, 0))
    torch.testing.assert_close(found.double(), oracle(harness, layout, tensors), **EXACT)
    assert (form == "merged") == all(plan.mask is None for plan in library.plans), "a block alone needs no mask"


@LAWS
@given(form=st.sampled_from(sorted(FORMS)), seed=st.integers(0, 999), data=st.data())
def test_a_padded_layout_gives_its_real_rows(form, seed, data):
    """Every request carries the same rows; how many are real is on the device alone."""
    batch, width, block = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    groups = data.draw(st.integers(1, width))
    committed = [data.draw(st.integers(1, 90)) for _ in range(batch)]
    real = [data.draw(st.integers(1, width)) for _ in range(batch)]
    harness = Harness(GQA, [n + width for n in committed], seed=seed)
    layout = BlockLayout.uniform(
        torch.tensor(committed), width, groups, block, widths=torch.tensor(real), host_committed=committed
    )
    rows, _ = make(form, harness)
    tensors = row_tensors(harness, layout)
    found = rows.attend(harness.layer(), *tensors, rows.prepare(harness.requests, layout, 0))
    kept = layout.mask.valid.flatten()
    assert found.isfinite().all()
    torch.testing.assert_close(found.double()[kept], oracle(harness, layout, tensors)[kept], **EXACT)


@LAWS
@given(form=st.sampled_from(sorted(FORMS)), seed=st.integers(0, 999), data=st.data())
def test_a_token_tree_equals_the_dense_oracle(form, seed, data):
    width, block = data.draw(st.integers(2, 7)), data.draw(st.integers(1, 4))
    groups = data.draw(st.integers(1, width))
    committed = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))
    parent = torch.tensor([[-1, *(data.draw(st.integers(0, i - 1)) for i in range(1, width))] for _ in committed])
    harness = Harness(GQA, [n + width for n in committed], seed=seed)
    count = len(committed)
    layout = BlockLayout.ragged(committed, [width] * count, [groups] * count, block, parent=parent)
    rows, _ = make(form, harness)
    tensors = row_tensors(harness, layout)
    found = rows.attend(harness.layer(), *tensors, rows.prepare(harness.requests, layout, 0))
    torch.testing.assert_close(found.double(), oracle(harness, layout, tensors), **EXACT)


@LAWS
@given(spec=passes(60), seed=st.integers(0, 999))
def test_the_forms_equal_the_cpu_backend(spec, seed):
    harness, layout = build(GQA, spec, seed)
    harness.runner.attn_backend = SdpaBackend(harness.runner)
    cpu = SdpaMaskRows(harness.runner)
    tensors = row_tensors(harness, layout)
    expected = cpu.attend(harness.layer(), *tensors, cpu.prepare(harness.requests, layout, 0))
    for form in FORMS:
        rows, _ = make(form, harness)
        found = rows.attend(harness.layer(), *tensors, rows.prepare(harness.requests, layout, 0))
        torch.testing.assert_close(found, expected, **EXACT)


@LAWS
@given(form=st.sampled_from(sorted(FORMS)), spec=passes(60), seed=st.integers(0, 999))
def test_sinks_are_one_more_logit(form, spec, seed):
    harness, layout = build(GQA, spec, seed)
    rows, _ = make(form, harness)
    tensors = row_tensors(harness, layout)
    sinks = torch.randn(GQA.heads, generator=harness.random) * 3
    found = rows.attend(harness.layer(), *tensors, rows.prepare(harness.requests, layout, 0), sinks)
    torch.testing.assert_close(found.double(), oracle(harness, layout, tensors, sinks=sinks), **EXACT)


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_an_8_bit_pool_is_read_through_its_scales(form, kv_dtype, scale):
    harness, layout = build(GQA, ([70, 9, 33], [4, 0, 2], [3, 1, 0], 5), seed=3)
    pools = [pool.to(kv_dtype) for pool in (harness.pool.keys, harness.pool.values)]
    source = SimpleNamespace(
        req_to_token_pool=harness.runner.req_to_token_pool,
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda _: pools[0], get_value_buffer=lambda _: pools[1]),
    )
    rows, _ = make(form, harness, source, kv_dtype)
    layer = harness.layer()
    layer.k_scale_float, layer.v_scale_float = scale, None if scale is None else 3 * scale
    tensors = row_tensors(harness, layout)
    found = rows.attend(layer, *tensors, rows.prepare(harness.requests, layout, 0))
    real = [pool.double() * (1.0 if factor is None else factor)
            for pool, factor in zip(pools, (layer.k_scale_float, layer.v_scale_float))]  # fmt: skip
    torch.testing.assert_close(found.double(), oracle(harness, layout, tensors, real), **EXACT)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_half_precision_stays_within_its_rounding(form):
    for dtype in (torch.bfloat16, torch.float16):
        harness, layout = build(replace(WIDE, dtype=dtype), ([120, 31], [5, 3], [4, 3], 8), seed=4)
        rows, _ = make(form, harness)
        tensors = row_tensors(harness, layout)
        found = rows.attend(harness.layer(), *tensors, rows.prepare(harness.requests, layout, 0))
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), oracle(harness, layout, tensors), atol=2e-2, rtol=2e-2)


# ---- merging --------------------------------------------------------------------------------------------------------


@LAWS
@given(seed=st.integers(0, 999), first=st.integers(0, 40), second=st.integers(0, 40))
def test_merging_two_key_sets_is_attending_both(seed, first, second):
    """Also where one set is empty, or both are."""
    random = torch.Generator().manual_seed(seed)
    shape = head_shape(GQA)
    library = TwinLibrary()
    kernels = Kernels(library, "cpu", 64)
    q = torch.randn(3, shape.heads, shape.head_dim, generator=random)
    k, v = (torch.randn(first + second, shape.kv_heads, shape.head_dim, generator=random) for _ in range(2))
    parts = []
    for chosen in (slice(0, first), slice(first, None), slice(None)):
        call = kernels.ragged(MaskMode.FULL, shape)
        own = k[chosen].contiguous()
        call.plan([3], [own.shape[0]])
        parts.append(call.run(q, own, v[chosen].contiguous()))
    merged = kernels.merge(parts[0], parts[1])
    for found, expected in zip(merged, parts[2], strict=True):
        torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize(("heads", "head_dim", "turns"), [(64, 128, 1), (65, 128, 2), (129, 64, 2), (96, 256, 3)])
def test_more_heads_than_a_block_of_threads_are_merged_in_turns(heads, head_dim, turns):
    random = torch.Generator().manual_seed(heads)
    parts = [
        (torch.randn(2, heads, head_dim, generator=random), torch.randn(2, heads, generator=random)) for _ in range(2)
    ]
    library = TwinLibrary()
    found = Kernels(library, "cpu", 64).merge(*parts)
    assert library.merges == turns
    for part, expected in zip(found, TwinLibrary().merge_state(*parts[0], *parts[1]), strict=True):
        torch.testing.assert_close(part, expected, **EXACT)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_every_kind_of_call_is_warmed_up(kv_dtype):
    library = TwinLibrary()
    shape = HeadShape(8, 2, 64, 0.125, torch.bfloat16, kv_dtype)
    Kernels(library, "cpu", 64).warm_up(shape)
    assert [(plan.kind, plan.kv_dtype) for plan in library.plans] == [("paged", kv_dtype), ("ragged", torch.bfloat16)]
    assert library.merges == 1


# ---- plans ----------------------------------------------------------------------------------------------------------


@LAWS
@given(form=st.sampled_from(sorted(FORMS)), spec=passes(), seed=st.integers(0, 99))
def test_plans_hold_the_rows_and_keys_of_the_layout(form, spec, seed):
    committed, widths, groups, block = spec
    harness, layout = build(GQA, spec, seed)
    rows, library = make(form, harness)
    rows.prepare(harness.requests, layout, 0)
    asked = [i for i, count in enumerate(groups) if count]
    own = [groups[i] * block for i in asked]
    flight = [widths[i] + groups[i] * block for i in asked]
    if form == "merged":
        prefix, tail = library.plans
        assert (prefix.kind, prefix.query_lens, prefix.key_lens) == ("paged", own, [committed[i] for i in asked])
        expected = [harness.table[harness.requests[i], : committed[i]] for i in asked]
        assert torch.equal(prefix.slots, torch.cat(expected))
        assert prefix.page_size == 1
        assert prefix.mask is None
        assert (tail.kind, tail.query_lens, tail.key_lens) == ("ragged", own, flight)
    else:
        (call,) = library.plans
        assert (call.kind, call.query_lens) == ("ragged", own)
        assert call.key_lens == [committed[i] + keys for i, keys in zip(asked, flight)]
        assert call.mask is not None
    for plan in library.plans:
        assert plan.heads == (GQA.heads, GQA.kv_heads, GQA.head_dim)
        assert (plan.causal, plan.sm_scale, plan.q_dtype) == (False, GQA.head_dim**-0.5, torch.float32)


def test_the_small_mask_does_not_grow_with_the_context():
    sizes = set()
    for length in (5, 500, 5000):
        harness, layout = build(MHA, ([length], [4], [4], 8), seed=1)
        rows, library = make("merged", harness)
        rows.prepare(harness.requests, layout, 0)
        sizes.add(library.plans[1].mask.numel())
    assert sizes == {(32 * (4 + 32) + 7) // 8}


def test_a_mask_is_never_used_by_a_later_pass_without_one():
    """Wrappers of one mode do not serve another, in any order of passes."""
    harness, parallel = build(GQA, ([30, 40], [4, 4], [3, 2], 4), seed=6)
    alone = BlockLayout.sequential(torch.tensor([34, 44]), 4, [34, 44])
    rows, _ = make("merged", harness)
    for layout in (parallel, alone, parallel, parallel, alone, alone):
        tensors = row_tensors(harness, layout)
        found = rows.attend(harness.layer(), *tensors, rows.prepare(harness.requests, layout, 0))
        torch.testing.assert_close(found.double(), oracle(harness, layout, tensors), **EXACT)


def test_a_pass_may_be_planned_while_another_is_under_way():
    harness, parallel = build(GQA, ([30, 40], [4, 4], [3, 2], 4), seed=6)
    other = BlockLayout.ragged([30, 40], [4, 4], [1, 4], 4)
    for form in FORMS:
        rows, _ = make(form, harness)
        metas = [rows.prepare(harness.requests, layout, 0) for layout in (parallel, other)]
        for layout, meta in zip((parallel, other), metas):
            tensors = row_tensors(harness, layout)
            found = rows.attend(harness.layer(), *tensors, meta)
            torch.testing.assert_close(found.double(), oracle(harness, layout, tensors), **EXACT)


def test_byte_pointers_replace_the_librarys_own():
    """The twin derives mask pointers in bits, as the library does: left alone, a second request reads another mask."""
    layout = BlockLayout.ragged([9, 13], [3, 3], [2, 2], 3)
    library = TwinLibrary()
    call = Kernels(library, "cpu", 64).ragged(MaskMode.CUSTOM, head_shape(GQA))
    mask = pack(layout, Rows.MASK)
    call.plan(mask.query_lens, mask.key_lens, mask)
    wrapper = call._wrapper
    assert torch.equal(wrapper._mask_indptr_buf, mask.byte_ptr)
    left_alone = torch.tensor([0, mask.query_lens[0] * mask.key_lens[0]])
    assert not torch.equal(wrapper._mask_indptr_buf[:2], left_alone)


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("tree", [False, True])
def test_a_pass_reads_nothing_back(form, tree):
    """On the meta device every read of a value, and every shape that depends on one, is an error."""
    table = torch.empty(8, 300, dtype=torch.int32, device="meta")
    pool = torch.empty(400, GQA.kv_heads, GQA.head_dim, dtype=torch.bfloat16, device="meta")
    source = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda _: pool, get_value_buffer=lambda _: pool),
    )
    library = TwinLibrary()
    shape = head_shape(replace(GQA, dtype=torch.bfloat16))
    rows = FORMS[form](source, Kernels(library, "meta", 64), shape)
    counts = torch.empty(3, dtype=torch.int64, device="meta")
    parent = torch.empty(3, 4, dtype=torch.int64, device="meta") if tree else None
    layouts = [
        BlockLayout.uniform(counts, 4, 3, 2, widths=counts, group_counts=counts, parent=parent,
                            host_committed=(5, 9, 200)),
        BlockLayout.ragged([5, 9, 200], [4, 2, 4], [3, 0, 1], 2, parent=parent, device="meta"),
        BlockLayout.sequential(counts, 8, (5, 9, 200)),
    ]  # fmt: skip
    layer = Harness(GQA, [1]).layer()
    slots = torch.empty(3, dtype=torch.int64, device="meta")
    for layout in layouts:
        meta = rows.prepare(slots, layout, 0)
        heads = (GQA.heads, GQA.kv_heads, GQA.kv_heads)
        tensors = [torch.empty(layout.mask.total, n, 16, dtype=torch.bfloat16, device="meta") for n in heads]
        out = rows.attend(layer, *tensors, meta)
        assert (out.shape, out.dtype) == ((layout.mask.total, GQA.heads * 16), torch.bfloat16)
    assert all(plan.slots is None or plan.slots.device.type == "meta" for plan in library.plans)
    assert all(plan.mask is None or plan.mask.device.type == "meta" for plan in library.plans)


def test_the_twin_takes_what_the_library_takes():
    """Names and defaults of every argument we pass exist in the installed library, so that the twin cannot drift."""
    flashinfer = pytest.importorskip("flashinfer")
    twin = TwinLibrary()
    for name in ("BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"):
        for method in ("__init__", "plan", "run"):
            ours = inspect.signature(getattr(getattr(twin, name), method)).parameters
            theirs = inspect.signature(getattr(getattr(flashinfer, name), method)).parameters
            assert set(ours) <= set(theirs), (name, method)
            positional = [key for key, value in ours.items() if value.kind is value.POSITIONAL_OR_KEYWORD]
            assert positional == list(theirs)[: len(positional)], (name, method)
    assert list(inspect.signature(flashinfer.merge_state).parameters) == ["v_a", "s_a", "v_b", "s_b"]
    for module in ("prefill", "cascade"):
        source = inspect.getsource(__import__(f"flashinfer.{module}", fromlist=["_"]))
        assert module != "prefill" or source.count("self._mask_indptr_buf = mask_indptr.to(") == 2


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_wrong_sizes_are_errors():
    harness, layout = build(GQA, ([20, 30], [3, 3], [2, 1], 4), seed=1)
    rows, _ = make("merged", harness)
    tensors = row_tensors(harness, layout)
    meta = rows.prepare(harness.requests, layout, 0)
    with pytest.raises(ValueError, match="planned for"):
        rows.attend(harness.layer(), tensors[0][1:], *tensors[1:], meta)
    other = harness.layer()
    other.scaling = 1.0
    with pytest.raises(ValueError, match="scales by"):
        rows.attend(other, *tensors, meta)
    with pytest.raises(ValueError, match="host_committed"):
        rows.prepare(harness.requests, replace(layout, host_committed=None), 0)
    with pytest.raises(ValueError, match="no mask rows"):
        rows.prepare(harness.requests, BlockLayout.ragged([20, 30], [3, 3], [0, 0], 4), 0)
    kernels = Kernels(TwinLibrary(), "cpu", 64)
    mask = pack(layout, Rows.MASK)
    custom, full = kernels.ragged(MaskMode.CUSTOM, head_shape(GQA)), kernels.ragged(MaskMode.FULL, head_shape(GQA))
    with pytest.raises(ValueError, match="lengths must agree"):
        custom.plan([1, 2], mask.key_lens, mask)
    with pytest.raises(ValueError, match="only custom takes one"):
        full.plan(mask.query_lens, mask.key_lens, mask)
    with pytest.raises(ValueError, match="only custom takes one"):
        custom.plan(mask.query_lens, mask.key_lens)
    with pytest.raises(ValueError, match="slots of shape"):
        kernels.paged(MaskMode.FULL, head_shape(GQA)).plan([2], [3], torch.zeros(4, dtype=torch.int32))


def test_rows_are_gathered_where_the_table_says():
    harness = Harness(MHA, [20, 9], page_size=4, seed=2)
    found = slots_of(harness.table, harness.requests, torch.tensor([3, 0]), [5, 9])
    expected = [harness.table[harness.requests[0], 3:8], harness.table[harness.requests[1], :9]]
    assert torch.equal(found, torch.cat(expected))
    keys = InlineKeys.build(harness.table, harness.requests, torch.tensor([18, 7]), [2, 2], [1, 3])
    packed = keys.fill(harness.pool.keys, torch.arange(4.0).view(4, 1, 1).expand(4, 2, 8), None)
    assert packed[keys.own_at, 0, 0].tolist() == [0, 1, 2, 3]
    assert keys.own_at.tolist() == [2, 5, 6, 7]
    assert torch.equal(packed[:2], harness.pool.keys[harness.table[harness.requests[0], 18:20].long()])


def test_tail_masks_are_kept_and_bounded(monkeypatch):
    harness = Harness(MHA, [40], seed=2)
    rows, _ = make("merged", harness)
    assert isinstance(rows, MergedMaskRows)
    monkeypatch.setattr("sglang_ext.serving.attention.flashinfer.KEPT_TAIL_MASKS", 3)
    for width in (1, 2, 3, 4, 4, 5):
        rows.prepare(harness.requests, BlockLayout.ragged([30], [width], [width], 2), 0)
    assert [key[0] for key in rows._masks] == [(3,), (4,), (5,)]
