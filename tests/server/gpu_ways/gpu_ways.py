"""A SGLang plugin that makes a CPU server work the way a GPU server does; the suite puts this folder on the path.

Steps are decided on the device, scheduling is overlapped, attention goes through FlashInfer's twin, planned on the
host, and decode passes are captured and replayed from a tape. What is left out is what only a GPU has: FlashInfer's
kernels and CUDA's own graphs.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ext.serving.device import DeviceWays

WAYS = "sglang_ext.serving.device.ways_of"
CHECK = "sglang_ext.serving.attention.flashinfer_calls.HeadShape.check"
BACKEND = "torch_native"

_kernels: list[Any] = []


def gpu_ways(device: str, attention_backend: str) -> DeviceWays:
    """Stand in for :func:`sglang_ext.serving.device.ways_of`."""
    from sglang_ext.serving.graphs.tape import TapeRecorder

    return DeviceWays(reads_back=False, overlaps=True, kernels=twin_kernels, recorder=TapeRecorder, torch_attends=False)


def twin_kernels(model_runner: Any) -> Any:
    """Return the process's calls, the twin's; the host's attention backends are made to verify through them."""
    if not _kernels:
        from sglang_ext.serving.attention.flashinfer_calls import Kernels
        from sglang_ext.serving.attention.flashinfer_twin import TwinLibrary

        _kernels.append(Kernels(TwinLibrary(), "cpu"))
        install(_kernels[0], model_runner)
    return _kernels[0]


def install(kernels: Any, model_runner: Any) -> None:
    """Let the CPU's attention backend verify as a GPU's does."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.runtime_context import get_parallel

    from sglang_ext.serving.attention.flashinfer_calls import HeadShape
    from sglang_ext.serving.attention.flashinfer_verify import ChainVerify
    from sglang_ext.serving.attention.sdpa import SdpaBackend

    class Verifying(ChainVerify, SdpaBackend):
        def _kv_write_scales(self, layer: Any) -> tuple[Any, Any]:
            return ()

    def make(runner: Any) -> Any:
        backend = Verifying(runner)
        config = runner.model_config
        size = get_parallel().tp_size
        heads, kv_heads = config.num_attention_heads // size, config.get_num_kv_heads(size)
        shape = HeadShape(heads, kv_heads, config.head_dim, config.head_dim**-0.5, runner.dtype, runner.kv_cache_dtype)
        backend.use_calls(kernels, shape)
        return backend

    ATTENTION_BACKENDS[BACKEND] = make


def register() -> None:
    """Take the place of what the package decides by device; the twin computes in any type and head size."""
    HookRegistry.register(WAYS, gpu_ways, HookType.REPLACE)
    HookRegistry.register(CHECK, lambda self: None, HookType.REPLACE)
