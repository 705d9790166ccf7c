"""What the worker's device asks of it, decided in one place.

Everything that differs between a CPU and a GPU beyond where tensors live is a field here, so that a test can give the
worker a GPU's ways on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_ext.serving.attention.flashinfer_calls import Kernels

CPU = "cpu"


@dataclass(frozen=True)
class DeviceWays:
    """How a worker goes about its work on one device.

    Attributes:
        reads_back: reading a number from the device costs nothing, so steps are decided on the host.
        overlaps: the host may start a step before it has read what the one before committed.
        kernels: makes the calls of attention that is planned on the host; None where torch attends.
    """

    reads_back: bool
    overlaps: bool
    kernels: Callable[[Any], Kernels] | None


def ways_of(device: str, attention_backend: str) -> DeviceWays:
    """Return the ways of a device under one of the host's attention backends."""
    if device == CPU:
        # One process runs both the scheduler and the forward pass on a CPU: overlap only delays stops by one step.
        return DeviceWays(reads_back=True, overlaps=False, kernels=None)
    return DeviceWays(
        reads_back=False, overlaps=True, kernels=shared_kernels_of if attention_backend == "flashinfer" else None
    )


def shared_kernels_of(model_runner: Any) -> Kernels:
    """Return the process's calls on the runner's device."""
    from sglang_ext.serving.attention.gpu import shared_kernels

    return shared_kernels(str(model_runner.device))
