"""The installed FlashInfer's own planning, given our calls: what reaches its compiled part; nothing is read back.

The library's Python runs unchanged; only the compiled module is replaced, by one that notes its arguments. Tensors of
the device are on torch's meta device, where every read of a value is an error.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("flashinfer")

import flashinfer
import torch

from sglang_ext.core.block import BlockLayout
from sglang_ext.serving.attention.flashinfer import FORMS
from sglang_ext.serving.attention.flashinfer_calls import HeadShape, Kernels, MaskMode
from sglang_ext.serving.attention.flashinfer_twin import TwinLibrary

SHAPE = HeadShape(8, 2, 64, 0.125, torch.bfloat16, torch.bfloat16)
#: The last arguments of the compiled plan, in its order.
REST = ("total_rows", "batch", "heads", "kv_heads", "page", "graph", "qk", "vo", "causal", "window", "split",
        "no_split", "colocated", "uniform")  # fmt: skip


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the compiled module was asked to plan, call by call."""
    plans: list[dict[str, Any]] = []

    def get_module(backend: str, *kind: Any) -> SimpleNamespace:
        def plan(workspace, numbers, pinned, qo, kv, lengths, *rest):
            plans.append({"backend": backend, "kind": kind, "qo": qo, "kv": kv, "lengths": lengths}
                         | dict(zip(REST, rest, strict=True)))  # fmt: skip
            return [0]

        return SimpleNamespace(plan=plan)

    empty = torch.empty
    # Page-locked memory needs a driver.
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    monkeypatch.setattr("flashinfer.prefill.get_batch_prefill_module", get_module)
    return plans


def layouts(device: str) -> list[BlockLayout]:
    counts = torch.full((3,), 2, dtype=torch.int64, device=device)
    parent = torch.tensor([[-1, 0, 0, 1]] * 3).to(device)
    committed = torch.tensor([5, 9, 200]).to(device)
    return [
        BlockLayout.ragged([5, 9, 200], [4, 2, 4], [3, 0, 1], 2, device=device),
        BlockLayout.ragged([5, 9, 200], [4, 4, 4], [3, 1, 4], 2, parent=parent, device=device),
        BlockLayout.uniform(committed, 4, 3, 2, widths=counts, host_committed=(5, 9, 200)),
        BlockLayout.sequential(committed, 8, (5, 9, 200)),
    ]


def prepared(form: str, library: Any, device: str) -> list[Any]:
    table = torch.zeros(8, 300, dtype=torch.int32, device=device)
    source = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=None)
    rows = FORMS[form](source, Kernels(library, device, 64), SHAPE)
    requests = torch.zeros(3, dtype=torch.int64, device=device)
    return [rows.prepare(requests, layout, 0) for layout in layouts(device)]


@pytest.mark.parametrize("form", sorted(FORMS))
def test_the_compiled_part_is_asked_for_what_the_twin_was(form: str, noted: list[dict[str, Any]]) -> None:
    twin = TwinLibrary()
    prepared(form, twin, "cpu")
    prepared(form, flashinfer, "meta")
    assert len(noted) == len(twin.plans) > 0
    for real, ours in zip(noted, twin.plans):
        for name in ("qo", "kv", "lengths"):
            assert (real[name].device.type, real[name].dtype) == ("cpu", torch.int32), name
        assert (real["qo"].tolist(), real["kv"].tolist()) == (ours.qo, ours.kv)
        assert real["lengths"].tolist() == ours.key_lens
        assert (real["total_rows"], real["batch"]) == (ours.qo[-1], len(ours.key_lens))
        assert (real["heads"], real["kv_heads"], real["qk"], real["vo"]) == (8, 2, 64, 64)
        assert (real["page"], real["graph"], real["causal"], real["window"]) == (1, False, ours.causal, -1)
        assert (real["split"], real["no_split"], real["colocated"], real["uniform"]) == (-1, False, 0, 0)
        # Types, index type, head sizes, no rotary embedding, no window, no cap, no 16 bit sums.
        types = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)
        assert (real["backend"], real["kind"]) == ("fa2", (*types, 64, 64, 0, False, False, False))


def test_wrappers_hold_our_mask_where_the_kernel_reads_it(noted: list[dict[str, Any]]) -> None:
    """The library takes its mode from the buffer, and byte pointers stand where it had put bit pointers."""
    for meta in prepared("masked", flashinfer, "meta"):
        wrapper = meta.call._wrapper
        assert wrapper._custom_mask_buf.dtype == torch.uint8
        assert wrapper._mask_indptr_buf.dtype == torch.int32
        assert wrapper._custom_mask_buf.device.type == wrapper._mask_indptr_buf.device.type == "meta"
    call = Kernels(flashinfer, "cpu", 64).ragged(MaskMode.FULL, SHAPE)
    call.plan([3, 2], [7, 9])
    assert call._wrapper._custom_mask_buf is None
    assert noted[-1]["causal"] is False


def test_a_chain_is_planned_causal_and_8_bit_pools_by_their_type(noted: list[dict[str, Any]]) -> None:
    shape = HeadShape(8, 2, 128, 0.125, torch.bfloat16, torch.float8_e4m3fn)
    call = Kernels(flashinfer, "meta", 64).paged(MaskMode.CAUSAL, shape)
    call.plan([3, 2], [8, 0], torch.zeros(8, dtype=torch.int32, device="meta"))
    (real,) = noted
    assert (real["causal"], real["qo"].tolist(), real["lengths"].tolist()) == (True, [0, 3, 5], [8, 0])
    assert real["kind"][:3] == (torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16)
