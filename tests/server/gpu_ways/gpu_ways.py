"""A SGLang plugin that makes a CPU server work the way a GPU server does; the suite puts this folder on the path.

Steps are decided on the device and scheduling is overlapped.
"""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ext.serving.device import DeviceWays

WAYS = "sglang_ext.serving.device.ways_of"


def gpu_ways(device: str, attention_backend: str) -> DeviceWays:
    """Stand in for :func:`sglang_ext.serving.device.ways_of`."""
    return DeviceWays(reads_back=False, overlaps=True, kernels=None)


def register() -> None:
    """Take the place of what the package decides by device."""
    HookRegistry.register(WAYS, gpu_ways, HookType.REPLACE)
