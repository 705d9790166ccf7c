"""What the worker's device asks of it, decided in one place.

Everything that differs between a CPU and a GPU beyond where tensors live is a field here, so that a test can give the
worker a GPU's ways on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_ext.serving.attention.flashinfer_calls import Kernels
from sglang_ext.serving.graphs.recorder import CudaRecorder, Recorder

CPU = "cpu"


@dataclass(frozen=True)
class DeviceWays:
    """How a worker goes about its work on one device.

    Attributes:
        reads_back: reading a number from the device costs nothing, so steps are decided on the host.
        overlaps: the host may start a step before it has read what the one before committed.
        kernels: makes the calls of attention that is planned on the host; None where torch attends.
        recorder: captures passes; None where passes are not captured.
        torch_attends: whether the host's attention backend is this package's own, written in torch for a CPU.
    """

    reads_back: bool
    overlaps: bool
    kernels: Callable[[Any], Kernels] | None
    recorder: Callable[[], Recorder] | None
    torch_attends: bool

    def kernels_of(self, model_runner: Any) -> Kernels | None:
        """Return the calls on a runner's device, if there are any."""
        return None if self.kernels is None else self.kernels(model_runner)


def ways_of(device: str, attention_backend: str) -> DeviceWays:
    """Return the ways of a device under one of the host's attention backends."""
    if device == CPU:
        # One process runs both the scheduler and the forward pass on a CPU: overlap only delays stops by one step.
        return DeviceWays(reads_back=True, overlaps=False, kernels=None, recorder=None, torch_attends=True)
    if attention_backend != "flashinfer":
        return DeviceWays(reads_back=False, overlaps=True, kernels=None, recorder=None, torch_attends=False)
    return DeviceWays(
        reads_back=False, overlaps=True, kernels=shared_kernels_of, recorder=CudaRecorder, torch_attends=False
    )


def shared_kernels_of(model_runner: Any) -> Kernels:
    """Return the process's calls on the runner's device."""
    from sglang_ext.serving.attention.gpu import shared_kernels

    return shared_kernels(str(model_runner.device))
