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
from sglang_ext.serving.attention import flashinfer_verify, gpu
from sglang_ext.serving.attention.flashinfer import MaskedMaskRows, MergedMaskRows
from sglang_ext.serving.attention.flashinfer_calls import Kernels
from sglang_ext.serving.attention.flashinfer_twin import TwinLibrary
from sglang_ext.serving.attention.mask_rows import MaskRowAttention
from sglang_ext.serving.gpu_plan import apply_gpu_defaults, check_gpu_args
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
    "device": "cpu",
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
        ({"cuda_graph_backend_decode": "full"}, ("--cuda-graph-backend-decode full", "without CUDA graphs")),
        ({"cuda_graph_backend_prefill": "breakable"}, ("--cuda-graph-backend-prefill breakable",)),
        (
            {
                "cuda_graph_config": with_phase(default_cuda_graph_config(), Phase.DECODE, backend=Backend.FULL),
                "_cuda_graph_config_locked": {(Phase.DECODE, "backend")},
            },
            ("--cuda-graph-config, decode backend full", "without CUDA graphs"),
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


def test_graphs_are_off_in_the_resolved_record_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The host reads ``cuda_graph_config`` from here on; the older switch would come too late."""
    asked = default_cuda_graph_config()
    assert asked.decode.backend != Backend.DISABLED
    args = SimpleNamespace(**GPU | {"cuda_graph_config": asked}, disable_overlap_schedule=False)
    with caplog.at_level(logging.WARNING):
        apply_gpu_defaults(args)
    assert args.disable_overlap_schedule
    assert args.disable_flashinfer_autotune
    assert [getattr(args.cuda_graph_config, phase).backend for phase in Phase.ALL] == [Backend.DISABLED] * 2
    assert "CUDA graphs and overlapped scheduling are off" in caplog.text


def test_the_algorithm_checks_a_gpu_and_leaves_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = SpecPlan("FLEXDRAFT", None, 8, SpecOptions())
    monkeypatch.setattr(algorithm, "plan_from_args", lambda *_: plan)
    monkeypatch.setattr(algorithm.request_hooks, "install", lambda *_: None)
    spec = object.__new__(algorithm.PluginAlgorithm)
    object.__setattr__(spec, "name", "FLEXDRAFT")
    common = {"max_running_requests": None, "cuda_graph_config": default_cuda_graph_config()}
    common |= {"model_path": "target", "tp_size": 1}
    on_gpu = SimpleNamespace(**GPU | common)
    spec.handle_server_args(on_gpu)
    assert on_gpu.cuda_graph_config.decode.backend == Backend.DISABLED
    with pytest.raises(Refusal, match="fa3"):
        spec.handle_server_args(SimpleNamespace(**GPU | common | {"attention_backend": "fa3"}))
    on_cpu = SimpleNamespace(**GPU | common | {"device": "cpu", "attention_backend": "torch_native"})
    spec.handle_server_args(on_cpu)
    assert on_cpu.disable_overlap_schedule
    assert on_cpu.cuda_graph_config is common["cuda_graph_config"]


def use_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "shared_kernels", lambda device: Kernels(TwinLibrary(), device, 64))


def test_the_backend_decides_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_twin(monkeypatch)
    source = SimpleNamespace()
    assert isinstance(gpu.gpu_mask_attention(source, **HEADS), MergedMaskRows)
    assert isinstance(gpu.gpu_mask_attention(source, **HEADS | {"form": "masked"}), MaskedMaskRows)
    assert isinstance(gpu.gpu_mask_attention(source, **HEADS | {"backend": "triton"}), MaskRowAttention)


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
def test_heads_and_types_the_kernels_cannot_serve_are_refused(
    change: dict[str, Any], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_twin(monkeypatch)
    with pytest.raises(Refusal) as refused:
        gpu.gpu_mask_attention(SimpleNamespace(), **HEADS | change)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", None)
    gpu.shared_kernels.cache_clear()
    with pytest.raises(Refusal, match="FlashInfer cannot be imported"):
        gpu.gpu_mask_attention(SimpleNamespace(), **HEADS)


def test_layers_with_another_rule_are_refused() -> None:
    def layer(window: int = -1, cap: float = 0.0) -> SimpleNamespace:
        attention = SimpleNamespace(layer_id=3, sliding_window_size=window, logit_cap=cap)
        return SimpleNamespace(self_attn=SimpleNamespace(attn=attention))

    gpu.check_layers([layer(), layer()])
    with pytest.raises(Refusal, match="layer 3 has a sliding window"):
        gpu.check_layers([layer(), layer(window=128)])
    with pytest.raises(Refusal, match="capped attention scores"):
        gpu.check_layers([layer(cap=30.0)])


def test_verification_is_installed_beside_flashinfer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    use_twin(monkeypatch)
    installed: list[Kernels] = []
    monkeypatch.setattr(flashinfer_verify, "install", installed.append)
    for backend, count in (("triton", 0), ("flashinfer", 1)):
        monkeypatch.setattr(gpu, "backend_name", lambda _, backend=backend: backend)
        gpu.install_verification(SimpleNamespace(device="cpu"))
        assert len(installed) == count


def test_the_backend_that_verifies_is_the_one_for_decoding() -> None:
    args = SimpleNamespace(**GPU | {"decode_attention_backend": "triton"})
    assert gpu.backend_name(SimpleNamespace(server_args=args)) == "triton"
