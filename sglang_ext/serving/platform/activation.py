"""When the CPU platform serves a machine. Imports nothing of the host, which asks this while it is being imported."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.metadata import entry_points

import torch

PLATFORM_NAME = "sglang_ext_cpu"
"""Entry point name; ``SGLANG_PLATFORM=sglang_ext_cpu`` asks for it by hand."""

PLATFORM_CLASS = "sglang_ext.serving.platform.cpu:SglangExtCpuPlatform"

BACKEND_NAME = "torch_native"
"""Registry name our attention backend takes over: the host treats this name as safe without Triton everywhere."""


def is_active() -> bool:
    """True if this process runs on our CPU platform."""
    from sglang.srt.platforms import current_platform

    chosen = type(current_platform)
    return f"{chosen.__module__}:{chosen.__qualname__}" == PLATFORM_CLASS


def should_activate(asked: str | None, accelerator: bool, other_platforms: Iterable[str]) -> bool:
    """Decide whether the platform serves this machine.

    Args:
        asked: value of ``SGLANG_PLATFORM``, None or empty if unset.
        accelerator: torch sees an accelerator (CUDA, ROCm, XPU, NPU, MPS).
        other_platforms: entry point names of other installed platforms. The host refuses two active platforms, so
            without an explicit request ours gives way.
    """
    if asked:
        return asked == PLATFORM_NAME
    return not accelerator and not list(other_platforms)


def other_platforms(allowed: str | None) -> list[str]:
    """Names of other platforms the host would activate; ``allowed`` is the value of ``SGLANG_PLUGINS``."""
    names = {entry.name for entry in entry_points(group="sglang.srt.platforms")} - {PLATFORM_NAME}
    if allowed:
        names &= {name.strip() for name in allowed.split(",")}
    return sorted(names)


def accelerator_present() -> bool:
    """True if torch sees any accelerator."""
    return torch.cuda.is_available() or torch.accelerator.is_available()


def threads_are_bound() -> bool:
    """True if the host was told by ``SGLANG_CPU_OMP_THREADS_BIND`` which CPUs each process takes."""
    return bool(os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"))


def activate() -> str | None:
    """Return the platform class path if it should serve this machine, else None (the host's protocol)."""
    active = should_activate(
        os.environ.get("SGLANG_PLATFORM"), accelerator_present(), other_platforms(os.environ.get("SGLANG_PLUGINS"))
    )
    return PLATFORM_CLASS if active else None
