"""Triton where it is installed, and the one way this package launches a kernel.

Kernels are compiled for the device of their tensors. With ``TRITON_INTERPRET=1``, which Triton reads when it is
imported, they run on the CPU instead: slow, and exact enough to be held against the torch twins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # the torch twins need nothing of it
    triton = None
    tl = None


def jit(function: Callable[..., None]) -> Any:
    """Mark a kernel; without Triton it stays a function that :func:`launch` refuses to run."""
    return function if triton is None else triton.jit(function)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run ``kernel`` on a grid of programs; nothing happens where the grid is empty.

    Raises:
        RuntimeError: Triton is not installed.
    """
    if triton is None:
        raise RuntimeError("a fused piece was called without Triton; it is needed for that: pip install triton")
    if all(grid):
        kernel[grid](*arguments, **constants)


def blocks(total: int, size: int) -> int:
    """Return how many blocks of ``size`` cover ``total``."""
    return -(-total // size)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``, the only lengths a kernel's ranges may have."""
    return 1 << max(number - 1, 0).bit_length()
