"""Start-up on a GPU: what cannot work is refused in one line that names the flag, the rest is switched off aloud."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, default_cuda_graph_config, with_phase

from sglang_ext.core.config import SpecOptions
from sglang_ext.core.refusal import Refusal
from sglang_ext.serving import algorithm
from sglang_ext.serving.attention import gpu
from sglang_ext.serving.attention.flashinfer import MaskedMaskRows, MergedMaskRows
from sglang_ext.serving.attention.flashinfer_calls import Kernels
from sglang_ext.serving.attention.flashinfer_twin import TwinLibrary
from sglang_ext.serving.attention.mask_rows import MaskRowAttention
from sglang_ext.serving.device import ways_of
from sglang_ext.serving.gpu_plan import apply_gpu_defaults, check_gpu_args, graph_batches, plan_graphs
from sglang_ext.serving.plan import SpecPlan

GPU: dict[str, Any] = {
    "speculative_algorithm": "FLEXDRAFT",
    "device": "cuda",
    "attention_backend": "flashinfer",
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "kv_cache_dtype": "auto",
    "cuda_graph_backend_decode": None,
    "cuda_graph_backend_prefill": None,
    "cuda_graph_config": default_cuda_graph_config(),
    "_cuda_graph_config_locked": set(),
    "enable_deterministic_inference": False,
    "enable_torch_compile": False,
    "enable_unified_memory": False,
    "enable_hisparse": False,
}
HEADS: dict[str, Any] = {
    "backend": "flashinfer",
    "form": "merged",
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 64,
    "dtype": torch.bfloat16,
    "kv_dtype": torch.bfloat16,
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"attention_backend": "triton"},
        {"attention_backend": "fa3", "prefill_attention_backend": "triton", "decode_attention_backend": "triton"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"cuda_graph_backend_decode": "disabled"},
        {"cuda_graph_backend_decode": "full"},
    ],
)
def test_what_is_served_is_accepted(change: dict[str, Any]) -> None:
    check_gpu_args(SimpleNamespace(**GPU | change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "xpu"}, ("--device xpu", "cuda")),
        ({"attention_backend": "fa3"}, ("fa3", "--attention-backend flashinfer")),
        ({"prefill_attention_backend": "fa3"}, ("fa3 (prefill)", "flashinfer (decode)", "--attention-backend")),
        ({"kv_cache_dtype": "fp4_e2m1"}, ("--kv-cache-dtype fp4_e2m1", "fp8_e4m3")),
        ({"attention_backend": "triton", "kv_cache_dtype": "fp8_e4m3"}, ("--kv-cache-dtype fp8_e4m3", "triton")),
        ({"cuda_graph_backend_decode": "breakable"}, ("--cuda-graph-backend-decode breakable", "full")),
        ({"cuda_graph_backend_prefill": "breakable"}, ("--cuda-graph-backend-prefill breakable",)),
        (
            {
                "cuda_graph_config": with_phase(default_cuda_graph_config(), Phase.PREFILL, backend=Backend.FULL),
                "_cuda_graph_config_locked": {(Phase.PREFILL, "backend")},
            },
            ("--cuda-graph-config, prefill backend full", "captures decode passes itself"),
        ),
        ({"enable_deterministic_inference": True}, ("--enable-deterministic-inference", "on a GPU")),
        ({"enable_torch_compile": True}, ("--enable-torch-compile",)),
        ({"enable_unified_memory": True}, ("--enable-unified-memory",)),
        ({"enable_hisparse": True}, ("--enable-hisparse",)),
    ],
)
def test_the_rest_is_refused_in_one_line(change: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(Refusal) as refused:
        check_gpu_args(SimpleNamespace(**GPU | change))
    message = str(refused.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_graphs_of_prefills_are_off_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The host reads ``cuda_graph_config`` from here on; the older switch would come too late."""
    asked = with_phase(default_cuda_graph_config(), Phase.PREFILL, backend=Backend.BREAKABLE)
    args = SimpleNamespace(**GPU | {"cuda_graph_config": asked})
    with caplog.at_level(logging.WARNING):
        apply_gpu_defaults(args)
    assert args.disable_flashinfer_autotune
    assert args.cuda_graph_config.prefill.backend == Backend.DISABLED
    assert "CUDA graphs of prefills are off" in caplog.text


@pytest.mark.parametrize(
    ("decode", "change", "captures", "expected"),
    [
        ({}, {}, True, [1, 2, 3, 4, 6, 8, 10]),
        ({"max_bs": 5}, {}, True, [1, 2, 3, 4, 5]),
        ({"bs": [1, 7, 64]}, {"cuda_graph_bs_decode": [1, 7, 64]}, True, [1, 7, 10]),
        ({"bs": [2, 4]}, {"_cuda_graph_config_locked": {(Phase.DECODE, "bs")}}, True, [2, 4]),
        ({"backend": Backend.DISABLED}, {}, True, []),
        ({}, {}, False, []),
    ],
)
def test_the_worker_captures_what_the_host_was_asked_to(
    decode: dict[str, Any], change: dict[str, Any], captures: bool, expected: list[int]
) -> None:
    config = with_phase(default_cuda_graph_config(), Phase.DECODE, **decode)
    record = GPU | {"cuda_graph_config": config, "max_running_requests": 10, "cuda_graph_bs_decode": None} | change
    args = SimpleNamespace(**record)
    plan_graphs(args, captures=captures)
    assert args.cuda_graph_config.decode.backend == Backend.DISABLED, "the host itself captures none"
    assert graph_batches(args) == expected


def test_the_algorithm_checks_a_gpu_and_leaves_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = SpecPlan("FLEXDRAFT", None, 8, SpecOptions())
    monkeypatch.setattr(algorithm, "plan_from_args", lambda *_: plan)
    monkeypatch.setattr(algorithm.request_hooks, "install", lambda *_: None)
    spec = object.__new__(algorithm.PluginAlgorithm)
    object.__setattr__(spec, "name", "FLEXDRAFT")
    common = {
        "model_path": "target",
        "tp_size": 1,
        "max_running_requests": None,
        "cuda_graph_config": default_cuda_graph_config(),
        "cuda_graph_bs_decode": None,
    }
    on_gpu = SimpleNamespace(**GPU | common)
    spec.handle_server_args(on_gpu)
    assert on_gpu.cuda_graph_config.decode.backend == Backend.DISABLED
    with pytest.raises(Refusal, match="fa3"):
        spec.handle_server_args(SimpleNamespace(**GPU | common | {"attention_backend": "fa3"}))
    on_cpu = SimpleNamespace(**GPU | common | {"device": "cpu", "attention_backend": "torch_native"})
    spec.handle_server_args(on_cpu)
    assert on_cpu.disable_overlap_schedule
    assert on_cpu.cuda_graph_config is common["cuda_graph_config"]


def twin() -> Kernels:
    return Kernels(TwinLibrary(), "cpu", 64)


def test_the_kernels_decide_the_attention() -> None:
    source = SimpleNamespace()
    assert isinstance(gpu.gpu_mask_attention(source, kernels=twin(), **HEADS), MergedMaskRows)
    assert isinstance(gpu.gpu_mask_attention(source, kernels=twin(), **HEADS | {"form": "masked"}), MaskedMaskRows)
    assert isinstance(gpu.gpu_mask_attention(source, kernels=None, **HEADS | {"backend": "triton"}), MaskRowAttention)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 80}, ("80 wide", "64, 128, 256", "--attention-backend triton")),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, ("float32", "--dtype bfloat16")),
        ({"kv_dtype": torch.float16}, ("float16", "--kv-cache-dtype auto")),
        ({"kv_dtype": torch.uint8}, ("uint8", "--kv-cache-dtype auto")),
        ({"heads": 7}, ("7 query heads", "--attention-backend triton")),
        ({"backend": "triton", "kv_dtype": torch.float8_e4m3fn}, ("float8", "--attention-backend flashinfer")),
    ],
)
def test_heads_and_types_the_kernels_cannot_serve_are_refused(change: dict[str, Any], words: tuple[str, ...]) -> None:
    kernels = None if change.get("backend") == "triton" else twin()
    with pytest.raises(Refusal) as refused:
        gpu.gpu_mask_attention(SimpleNamespace(), kernels=kernels, **HEADS | change)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", None)
    gpu.shared_kernels.cache_clear()
    with pytest.raises(Refusal, match="FlashInfer cannot be imported"):
        ways_of("cuda", "flashinfer").kernels_of(SimpleNamespace(device="cuda"))


def test_layers_with_another_rule_are_refused() -> None:
    def layer(window: int = -1, cap: float = 0.0) -> SimpleNamespace:
        attention = SimpleNamespace(layer_id=3, sliding_window_size=window, logit_cap=cap)
        return SimpleNamespace(self_attn=SimpleNamespace(attn=attention))

    gpu.check_layers([layer(), layer()])
    with pytest.raises(Refusal, match="layer 3 has a sliding window"):
        gpu.check_layers([layer(), layer(window=128)])
    with pytest.raises(Refusal, match="capped attention scores"):
        gpu.check_layers([layer(cap=30.0)])


def test_a_device_has_its_ways() -> None:
    cpu, gpu_ways, other = ways_of("cpu", "torch_native"), ways_of("cuda", "flashinfer"), ways_of("cuda", "triton")
    assert (cpu.reads_back, cpu.overlaps, cpu.kernels, cpu.recorder) == (True, False, None, None)
    assert not gpu_ways.reads_back
    assert gpu_ways.overlaps
    assert gpu_ways.kernels is not None
    assert gpu_ways.recorder is not None
    assert (other.kernels, other.recorder) == (None, None)
    assert other.overlaps


def test_the_backend_that_verifies_is_the_one_for_decoding() -> None:
    args = SimpleNamespace(**GPU | {"decode_attention_backend": "triton"})
    assert gpu.backend_name(SimpleNamespace(server_args=args)) == "triton"


def test_lengths_reach_the_host_whatever_the_attention_backend_needs() -> None:
    """Triton's backend says that it can do without; the worker, which plans steps from them, cannot."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_registry import get_spec

    load_plugins()
    pool = SimpleNamespace(req_to_token=torch.zeros((4, 8), dtype=torch.int32))
    algorithm = get_spec("DFLARE")
    assert algorithm is not None
    assert algorithm.create_future_map("cpu", pool, needs_cpu_seq_lens=False).needs_cpu_seq_lens
