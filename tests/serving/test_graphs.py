"""Captured passes without a GPU: what a tape may hold, attention that is planned before every replay, tile sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core.block import BlockLayout
from sglang_ext.serving.attention.flashinfer import MergedMaskRows, slots_of
from sglang_ext.serving.attention.flashinfer_calls import HeadShape, Kernels, MaskMode
from sglang_ext.serving.attention.flashinfer_graph import GraphedRows, GraphRooms
from sglang_ext.serving.attention.flashinfer_twin import TwinLibrary
from sglang_ext.serving.attention.graph_room import PLAN_ARGUMENTS, GraphRoom, with_uniform_rows
from sglang_ext.serving.attention.harness import AttentionShape, Harness
from sglang_ext.serving.graphs.recorder import WARM_UPS, CudaRecorder
from sglang_ext.serving.graphs.store import pass_sizes
from sglang_ext.serving.graphs.tape import CaptureError, TapeRecorder
from sglang_ext.serving.graphs.target_graph import SharedResults
from sglang_ext.serving.pass_size import PassSize

GQA = AttentionShape(heads=6, kv_heads=2, head_dim=16, dtype=torch.float32)
SHAPE = HeadShape(GQA.heads, GQA.kv_heads, GQA.head_dim, GQA.head_dim**-0.5, GQA.dtype, GQA.dtype)
CONTEXT = 96


# ---- the tape -------------------------------------------------------------------------------------------------------


def test_a_replay_reads_inputs_and_writes_results_where_they_were() -> None:
    source, kept = torch.zeros(3), torch.zeros(2, 3)

    def run() -> torch.Tensor:
        view = source.view(1, 3)
        kept[1:] = view + 1
        return (view * 2).expand(2, -1) + kept

    captured = TapeRecorder().capture(run)
    for value in (1.0, 5.0, -2.0):
        source.fill_(value)
        kept.zero_()
        captured.replay()
        assert captured.output.tolist() == [[2 * value] * 3, [3 * value + 1] * 3]
        assert kept[1].tolist() == [value + 1] * 3


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.tolist(),
        lambda x: x + torch.tensor([1.0]),
    ],
)
def test_what_goes_between_device_and_host_cannot_be_captured(reads: Any) -> None:
    with pytest.raises(CaptureError, match="captured pass"):
        TapeRecorder().capture(lambda: reads(torch.ones(2)))


def test_all_graphs_are_captured_on_one_stream_into_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pool holds is reused on the stream it was used on, and on no other."""
    streams: list[Any] = []
    pools: list[Any] = []

    class Graph:
        def pool(self) -> str:
            return "the pool"

        def replay(self) -> None:
            return

    @contextmanager
    def graph_capture(stream: Any = None) -> Iterator[Any]:
        yield SimpleNamespace(stream=object() if stream is None else stream)

    @contextmanager
    def graph(_: Graph, pool: Any, stream: Any) -> Iterator[None]:
        streams.append(stream)
        pools.append(pool)
        yield

    held: dict[str, Any] = {}
    monkeypatch.setattr("sglang.srt.distributed.parallel_state.graph_capture", graph_capture)
    pool_module = "sglang.srt.model_executor.runner_utils.pool"
    monkeypatch.setattr(f"{pool_module}.get_stream", lambda name: held.setdefault(name, object()))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    recorder, runs = CudaRecorder(), []
    for number in range(3):
        assert recorder.capture(lambda number=number: runs.append(number) or number).output == number
    assert runs == [number for number in range(3) for _ in range(WARM_UPS + 1)]
    assert len(set(map(id, streams))) == 1
    assert pools == [None, "the pool", "the pool"]


def test_logits_of_all_passes_lie_in_one_buffer() -> None:
    shared, sources = SharedResults(), [torch.rand(4, 3, 5), torch.rand(2, 3, 5)]
    captured = [TapeRecorder().capture(lambda source=source: shared.keep(source * 2)) for source in sources]
    assert len({found.output.data_ptr() for found in captured}) == 1
    for found, source in zip(captured, sources, strict=True):
        found.replay()
        assert torch.equal(found.output, source * 2)


# ---- attention ------------------------------------------------------------------------------------------------------


@st.composite
def steps(draw: st.DrawFn) -> tuple[PassSize, int, list[list[int]], bool]:
    """A captured size, K, committed lengths of a few steps that replay it, and whether one group hangs behind a row."""
    width, block = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    behind = draw(st.booleans())
    size = PassSize(draw(st.integers(1, 4)), width, 1 if behind else draw(st.integers(1, width)))
    lengths = st.lists(st.integers(1, CONTEXT - width), min_size=1, max_size=size.batch)
    return size, block, draw(st.lists(lengths, min_size=1, max_size=3)), behind


@settings(max_examples=40, deadline=None, print_blob=True)
@given(case=steps(), seed=st.integers(0, 999))
def test_replayed_mask_rows_are_those_of_the_eager_pass(case: Any, seed: int) -> None:
    """Steps of any number of requests and any lengths, through buffers and a plan made for one token each."""
    size, block, replays, behind = case
    kernels = Kernels(TwinLibrary(), "cpu", 64)
    harness = Harness(GQA, [CONTEXT] * size.batch, seed=seed)
    rows = MergedMaskRows(harness.runner, kernels, SHAPE)
    rooms = GraphRooms(kernels, size.batch, CONTEXT)
    graphed = GraphedRows(rows, rooms, size, block, behind)
    random = torch.Generator().manual_seed(seed)
    committed, accepted = (torch.zeros(size.batch, dtype=torch.int64) for _ in range(2))
    cache_loc = torch.zeros(size.batch * size.width, dtype=torch.int64)
    own = size.batch * size.groups * block
    q, k, v = (torch.zeros(own, heads, GQA.head_dim) for heads in (GQA.heads, GQA.kv_heads, GQA.kv_heads))
    graphed.plan([1] * size.batch, torch.zeros(size.batch, dtype=torch.int32))

    def run() -> torch.Tensor:
        layout = _layout(committed, size, block, accepted if behind else None, [0] * size.batch)
        return rows.attend(harness.layer(), q, k, v, graphed.meta(layout, cache_loc))

    captured = TapeRecorder().capture(run)
    for lengths in replays:
        real = len(lengths)
        host = torch.tensor(lengths)
        count = torch.randint(0, size.width, (real,), generator=random)
        eager = _layout(host, size, block, count if behind else None, lengths)
        requests = harness.requests[:real]
        for part in (q, k, v):
            part.copy_(torch.randn(part.shape, generator=random))
        used = real * size.groups * block
        expected = rows.attend(harness.layer(), q[:used], k[:used], v[:used], rows.prepare(requests, eager, 0))
        committed.zero_()[:real] = host
        accepted.zero_()[:real] = count
        cache_loc.zero_()[: real * size.width] = slots_of(harness.table, requests, host, [size.width] * real).long()
        graphed.plan([*lengths, *[0] * (size.batch - real)], slots_of(harness.table, requests, None, lengths))
        captured.replay()
        assert captured.output.isfinite().all(), "padded rows too"
        torch.testing.assert_close(captured.output[:used], expected, atol=4e-6, rtol=1e-5)


def _layout(
    committed: torch.Tensor, size: PassSize, block: int, accepted: torch.Tensor | None, host: list[int]
) -> BlockLayout:
    groups = 0 if accepted is not None else size.groups
    layout = BlockLayout.uniform(committed, size.width, groups, block, host_committed=host)
    return layout if accepted is None else layout.after(accepted)


def test_calls_in_a_graph_keep_their_rows() -> None:
    kernels = Kernels(TwinLibrary(), "cpu", 64)
    room = GraphRoom(2, 3, torch.zeros(8, dtype=torch.uint8), slots=torch.zeros(20, dtype=torch.int32))
    call = kernels.paged(MaskMode.FULL, SHAPE, room)
    call.plan([3, 3], [4, 0], torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="2 x 3"):
        call.plan([3], [4], torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="2 x 3"):
        call.plan([3, 2], [4, 4], torch.zeros(8, dtype=torch.int32))
    with pytest.raises(ValueError, match="room for 20"):
        call.plan([3, 3], [15, 15], torch.zeros(30, dtype=torch.int32))


@pytest.mark.parametrize("kind", ["BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"])
def test_the_installed_planner_is_told_the_rows_of_every_request(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own wrapper, planned on the host, with its compiled module replaced by one that takes notes."""
    flashinfer = pytest.importorskip("flashinfer")
    planned: list[tuple[Any, ...]] = []
    module = SimpleNamespace(plan=lambda *args: planned.append(args), paged_run=None, ragged_run=None)
    monkeypatch.setattr("flashinfer.prefill.get_batch_prefill_module", lambda *_: module)
    for name in ("empty", "zeros"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, make=make, pin_memory=False, **k: make(*a, **k))

    def pointers() -> torch.Tensor:
        return torch.zeros(3, dtype=torch.int32)

    wrapper_class = with_uniform_rows(getattr(flashinfer, kind), 16)
    paged = "Paged" in kind
    buffers = (
        {
            "paged_kv_indptr_buf": pointers(),
            "paged_kv_indices_buf": torch.zeros(50, dtype=torch.int32),
            "paged_kv_last_page_len_buf": torch.zeros(2, dtype=torch.int32),
        }
        if paged
        else {"kv_indptr_buf": pointers()}
    )
    wrapper = wrapper_class(
        torch.zeros(4096, dtype=torch.uint8),
        "NHD",
        backend="fa2",
        use_cuda_graph=True,
        qo_indptr_buf=pointers(),
        **buffers,
    )
    wrapper.reset_workspace_buffer(torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8))
    rows, keys = (torch.tensor(part, dtype=torch.int32) for part in ([0, 16, 32], [0, 20, 45]))
    own = (torch.zeros(45, dtype=torch.int32), torch.ones(2, dtype=torch.int32)) if paged else ()
    sizes = (8, 2, 128, 1) if paged else (8, 2, 128)
    wrapper.plan(rows, keys, *own, *sizes, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    (args,) = planned
    assert len(args) == PLAN_ARGUMENTS
    assert args[-1] == 16
    assert args[3].tolist() == [0, 16, 32]
    assert all(part.device.type == "cpu" for part in args[3:6])
    with pytest.raises(RuntimeError, match="expects FlashInfer"):
        wrapper._cached_module.plan(*args[:-1])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rows", "largest"),
    [(32, 8, 128, 16 * 16, 63), (64, 8, 128, 16 * 16, 31), (32, 8, 128, 16, 1016), (9, 3, 64, 1, 21509)],
)
def test_scratch_holds_a_row_of_partial_results_for_every_row_of_a_tile(
    heads: int, kv_heads: int, head_dim: int, rows: int, largest: int
) -> None:
    """By the library's own rule: tiles of 128, 64 or 16 rows, counted for every query head of a key/value head."""
    shape = HeadShape(heads, kv_heads, head_dim, 1.0, torch.bfloat16, torch.bfloat16)
    kernels = Kernels(TwinLibrary(), "cpu")
    found = max(batch for batch in range(1, 30000) if kernels.holds(shape, batch, rows))
    assert found == largest


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_sizes_cover_every_step_and_the_largest_come_first() -> None:
    sizes = pass_sizes([1, 2, 4], 8, joins_up_to=2)
    assert {(s.batch, s.width, s.groups) for s in sizes} == {
        (batch, width, groups)
        for batch in (1, 2, 4)
        for width in (1, 2, 4, 8)
        for groups in (0, width)
        if groups == 0 or batch <= 2
    }
    assert [s.batch for s in sizes] == sorted((s.batch for s in sizes), reverse=True)
