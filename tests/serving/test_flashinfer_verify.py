"""Laws of verification through FlashInfer's twin: chains, ragged chains and trees equal the CPU backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

from sglang_ext.core.block import BlockLayout, clean_mask
from sglang_ext.serving.attention import flashinfer_verify
from sglang_ext.serving.attention.flashinfer_calls import HeadShape, Kernels
from sglang_ext.serving.attention.flashinfer_twin import TwinLibrary
from sglang_ext.serving.attention.flashinfer_verify import ChainVerify, adopt, install
from sglang_ext.serving.attention.harness import AttentionShape, Harness
from sglang_ext.serving.attention.sdpa import SdpaBackend
from sglang_ext.serving.verify_input import ChainVerifyInput

GQA = AttentionShape(heads=6, kv_heads=2, head_dim=64, dtype=torch.float32)
LAWS = settings(max_examples=40, deadline=None, print_blob=True)


class Stock:
    """A host backend that only notes what reached it."""

    num_wrappers = 1

    def __init__(self, runner: object) -> None:
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.seen: list[str] = []

    def init_forward_metadata(self, forward_batch) -> None:
        self.seen.append("plan")

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        self.seen.append("attend")
        return q

    def _kv_write_scales(self, layer):
        return ()


class Verifying(ChainVerify, Stock):
    pass


def backend_of(harness: Harness) -> tuple[Verifying, TwinLibrary]:
    backend, library = Verifying(harness.runner), TwinLibrary()
    shape = harness.shape
    heads = HeadShape(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5, shape.dtype, shape.dtype)
    backend.use_calls(Kernels(library, "cpu", 64), heads)
    return backend, library


def verify_input(layout: BlockLayout, custom_mask: torch.Tensor | None = None) -> ChainVerifyInput:
    return ChainVerifyInput(
        draft_token=torch.zeros(layout.clean.total, dtype=torch.int64),
        positions=layout.clean_position,
        draft_token_num=layout.clean.width,
        custom_mask=custom_mask,
        verify_lens_cpu=list(layout.clean.carried),
        layout=layout,
    )


def batch_of(harness: Harness, widths: list[int], spec: ChainVerifyInput) -> SimpleNamespace:
    batch = harness.batch("verify", widths, spec)
    batch.out_cache_loc_is_physical = False
    return batch


def run(backend, harness: Harness, layout: BlockLayout, spec: ChainVerifyInput, query: torch.Tensor) -> torch.Tensor:
    widths = list(layout.clean.carried)
    batch = batch_of(harness, widths, spec)
    backend.init_forward_metadata(batch)
    return backend.forward_extend(query, *harness.new_rows(widths), harness.layer(), batch)


@LAWS
@given(data=st.data(), page=st.sampled_from([1, 16]), seed=st.integers(0, 999))
def test_chains_of_any_lengths_equal_the_cpu_backend(data, page, seed):
    committed = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    widths = [data.draw(st.integers(1, 9)) for _ in committed]
    harness = Harness(GQA, [n + w for n, w in zip(committed, widths)], page_size=page, seed=seed)
    layout = BlockLayout.ragged(committed, widths, [0] * len(widths), 4)
    query = harness.queries(widths)
    spec = verify_input(layout)
    expected = run(SdpaBackend(harness.runner), harness, layout, spec, query)
    backend, library = backend_of(harness)
    torch.testing.assert_close(run(backend, harness, layout, spec, query), expected, atol=4e-6, rtol=1e-5)
    (plan,) = library.plans
    assert (plan.causal, plan.mask, plan.query_lens) == (True, None, widths)
    assert backend.seen == []


@LAWS
@given(data=st.data(), seed=st.integers(0, 999))
def test_trees_equal_the_cpu_backend(data, seed):
    width = data.draw(st.integers(1, 9))
    committed = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    parent = torch.tensor([[-1, *(data.draw(st.integers(0, i - 1)) for i in range(1, width))] for _ in committed])
    harness = Harness(GQA, [n + width for n in committed], seed=seed)
    widths = [width] * len(committed)
    layout = BlockLayout.ragged(committed, widths, [0] * len(committed), 4, parent=parent)
    dense = clean_mask(layout, max(committed) + width)
    flat = torch.cat([dense[i, :, : n + width].flatten() for i, n in enumerate(committed)])
    query = harness.queries(widths)
    spec = verify_input(layout, flat)
    expected = run(SdpaBackend(harness.runner), harness, layout, spec, query)
    backend, library = backend_of(harness)
    torch.testing.assert_close(run(backend, harness, layout, spec, query), expected, atol=4e-6, rtol=1e-5)
    assert library.plans[0].mask is not None


def test_rows_are_written_before_they_are_read():
    harness = Harness(GQA, [20], seed=2)
    layout = BlockLayout.ragged([16], [4], [0], 4)
    backend, _ = backend_of(harness)
    batch = batch_of(harness, [4], verify_input(layout))
    k, v = (torch.randn(4, GQA.kv_heads, GQA.head_dim, generator=harness.random) for _ in range(2))
    backend.init_forward_metadata(batch)
    query = harness.queries([4])
    first = backend.forward_extend(query, k, v, harness.layer(), batch)
    assert torch.equal(harness.pool.keys[harness.own_slots([4])], k)
    again = backend.forward_extend(query, None, None, harness.layer(), batch, save_kv_cache=False)
    assert torch.equal(first, again)


def test_every_other_pass_is_the_hosts():
    harness = Harness(GQA, [20, 30], seed=2)
    backend, library = backend_of(harness)
    layout = BlockLayout.ragged([16, 26], [4, 4], [0, 0], 4)
    query = harness.queries([4, 4])
    run(backend, harness, layout, verify_input(layout), query)
    foreign = SimpleNamespace(draft_token_num=4, custom_mask=None)
    for mode, spec in (("extend", None), ("verify", foreign)):
        batch = harness.batch(mode, [4, 4], spec)
        backend.init_forward_metadata(batch)
        assert backend.forward_extend(query, None, None, harness.layer(), batch) is query
    assert backend.seen == ["plan", "attend"] * 2
    assert len(library.plans) == 1


def test_a_layer_of_another_shape_is_an_error():
    harness = Harness(GQA, [20], seed=2)
    backend, _ = backend_of(harness)
    layout = BlockLayout.ragged([16], [4], [0], 4)
    batch = batch_of(harness, [4], verify_input(layout))
    backend.init_forward_metadata(batch)
    layer = harness.layer()
    layer.scaling = 0.1
    with pytest.raises(ValueError, match="was planned"):
        backend.forward_extend(harness.queries([4]), None, None, layer, batch)


@pytest.mark.parametrize("tree", [False, True])
def test_planning_reads_nothing_back(tree):
    library = TwinLibrary()
    source = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=torch.empty(4, 99, dtype=torch.int32, device="meta")),
        token_to_kv_pool=SimpleNamespace(),
    )
    backend = Verifying(source)
    backend.use_calls(Kernels(library, "meta", 64), HeadShape(6, 2, 64, 0.125, torch.bfloat16, torch.bfloat16))
    parent = torch.empty(2, 3, dtype=torch.int64, device="meta") if tree else None
    layout = BlockLayout.ragged([5, 50], [3, 2], [0, 0], 4, parent=parent, device="meta")
    mode = SimpleNamespace(is_target_verify=lambda: True)
    requests = torch.empty(2, dtype=torch.int64, device="meta")
    backend.init_forward_metadata(
        SimpleNamespace(forward_mode=mode, spec_info=verify_input(layout), req_pool_indices=requests)
    )
    (plan,) = library.plans
    assert (plan.query_lens, plan.key_lens) == ([3, 2], [8, 52])


def test_the_hosts_backends_are_adopted_where_they_can_be(monkeypatch):
    harness = Harness(GQA, [20], seed=2)
    updater = SimpleNamespace(num_qo_heads=6, num_kv_heads=2, head_dim=64,
                              q_data_type=torch.bfloat16, data_type=torch.float8_e4m3fn)  # fmt: skip

    def stock(runner):
        made = Stock(runner)
        made.indices_updater_prefill = updater
        return made

    monkeypatch.setitem(ATTENTION_BACKENDS, "flashinfer", stock)
    monkeypatch.setattr(flashinfer_verify, "can_adopt", lambda backend: backend.num_wrappers == 1)
    kernels = Kernels(TwinLibrary(), "cpu", 64)
    install(kernels)
    made = ATTENTION_BACKENDS["flashinfer"](harness.runner)
    assert isinstance(made, ChainVerify)
    assert isinstance(made, Stock)
    assert made._shape.kv_dtype == torch.float8_e4m3fn
    with monkeypatch.context() as patch:
        patch.setattr(Stock, "num_wrappers", 2)
        assert type(ATTENTION_BACKENDS["flashinfer"](harness.runner)) is Stock
    assert adopt(stock(harness.runner), kernels).forward_extend is not None


def test_the_hosts_own_class_can_be_adopted() -> None:
    """Its class is laid out as an abstract one, and its helpers hold on to the instance they were made by."""
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    backend: Any = object.__new__(FlashInferAttnBackend)
    backend.indices_updater_prefill = SimpleNamespace(
        num_qo_heads=6, num_kv_heads=2, head_dim=64, q_data_type=torch.bfloat16, data_type=torch.bfloat16
    )
    verifying = adopt(backend, Kernels(TwinLibrary(), "cpu", 64))
    assert isinstance(verifying, ChainVerify) and isinstance(verifying, FlashInferAttnBackend)
    verifying.forward_metadata = "planned"
    assert backend.forward_metadata == "planned"
