"""The out-of-tree CPU platform. Only the host imports this module, once it has decided to use it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_ext.serving.platform.activation import BACKEND_NAME

DEFAULT_MEM_FRACTION = 0.5
DEFAULT_POOL_TOKENS = 65536
DEFAULT_CHUNKED_PREFILL = 2048
DEFAULT_RUNNING_REQUESTS = 48

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_limit(limits: Iterable[Path] = _CGROUP_LIMITS) -> int:
    """Bytes this process may use at most: the machine's memory or its container's limit, whichever is smaller."""
    total = int(psutil.virtual_memory().total)
    for path in limits:
        if path.exists():
            text = path.read_text().strip()
            if text.isdigit():
                return min(total, int(text))
    return total


class SglangExtCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU as the host's device: torch-native kernels, our attention backend, memory as the machine reports it."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes of memory, a container's limit included."""
        return memory_limit()

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        """Bytes not available to new allocations, counted against :meth:`get_device_total_memory`."""
        return float(max(0, memory_limit() - psutil.virtual_memory().available))

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        """``(free, total)`` bytes."""
        total = memory_limit()
        return min(total, int(psutil.virtual_memory().available)), total

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill in what the host would derive from a GPU's memory.

        Weights and KV pool together take at most half of the memory that is free at start, and the pool holds at most
        65536 tokens, so that a default server leaves the machine usable. ``--mem-fraction-static`` or
        ``--max-total-tokens`` lift both limits.
        """
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = DEFAULT_MEM_FRACTION
            if server_args.max_total_tokens is None:
                server_args.max_total_tokens = DEFAULT_POOL_TOKENS
        if server_args.chunked_prefill_size is None:
            server_args.chunked_prefill_size = DEFAULT_CHUNKED_PREFILL
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_RUNNING_REQUESTS
        # The host's idle loop polls without pause, which on a CPU takes a core from everybody else.
        server_args.sleep_on_idle = True
        if server_args.enable_deterministic_inference and server_args.attention_backend is None:
            server_args.attention_backend = BACKEND_NAME

    def get_default_attention_backend(self) -> str:
        """Ours, under the host's name."""
        return BACKEND_NAME

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Every algorithm may try; algorithms refuse for themselves."""
        return True

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        """Draft models use the same backend as the target."""
        return backend == BACKEND_NAME

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        """The target's backend."""
        return BACKEND_NAME

    def get_speculative_cache_locs_fn(self) -> Any:
        """Torch body of the host's Triton gather of KV slots for a block of draft tokens."""
        from sglang_ext.serving.platform.shims import block_cache_locs

        return block_cache_locs

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """The host's pool without its Triton copy warm-up."""
        if kind != "mha":
            return None
        from sglang_ext.serving.platform.kv_pool import CpuKVPool

        return CpuKVPool

    def get_dispatch_key_name(self) -> str:
        """Fused operators run their torch-native form."""
        return "native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """There is nothing to pin memory for."""
        return False

    def get_group_coordinator_device(self, local_rank: int) -> torch.device:
        """All ranks share the one CPU device."""
        return torch.device("cpu")

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """Profile CPU activity."""
        return torch.profiler.ProfilerActivity.CPU

    def get_torch_profiler_activity_str(self) -> str:
        """Name of the profiled activity."""
        return "CPU"

    def init_backend(self) -> None:
        """Put the attention backend and the hooks in place; called once in every process that runs a model."""
        from sglang_ext.serving.platform.shims import install_worker_shims

        install_worker_shims()

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Make sure that every shim took, before pools and workers are built on it.

        Raises:
            RuntimeError: naming the first shim that is not in place.
        """
        from sglang_ext.serving.platform.shims import assert_installed

        assert_installed()
