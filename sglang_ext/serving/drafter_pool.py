"""The drafter's own keys and values of committed tokens, slot by slot beside the target's pool.

Row i belongs to whatever token holds slot i of the target's pool. The host alone hands slots out, shares them between
requests through the prefix cache and takes them back; a token's drafter keys and values are written in the very pass
that writes the target's. So prefix hits, chunked prefill, retraction and aborts need nothing here, and no slot of this
pool can leak that is not a leak of the target's.

Shape legend: D drafter layers, P pool slots, N tokens, Hk key/value heads, Dh head size.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SIZING_HOOK = "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator"


class DrafterPool:
    """Keys and values ``[D][P, Hk, Dh]``; allocated once the host knows how many tokens fit.

    Args:
        layers: D.
        kv_heads: Hk of the drafter.
        head_dim: Dh of the drafter.
        dtype: of both tensors.
        device: where they live.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._shape = (kv_heads, head_dim)
        self._layers = layers
        self._dtype = dtype
        self._device = device
        self._keys = torch.empty(0)
        self._values = torch.empty(0)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in all layers."""
        kv_heads, head_dim = self._shape
        return 2 * self._layers * kv_heads * head_dim * self._dtype.itemsize

    @property
    def bytes(self) -> int:
        """Bytes allocated."""
        return self._keys.nbytes + self._values.nbytes

    @property
    def slots(self) -> int:
        """P, 0 before :meth:`allocate`."""
        return self._keys.shape[1] if self._keys.dim() > 1 else 0

    def allocate(self, slots: int) -> None:
        """Make room for ``slots`` P tokens, the host's padding slots included."""
        size = (self._layers, slots, *self._shape)
        # Zeros, not garbage: a masked NaN would still poison a product.
        self._keys = torch.zeros(size, dtype=self._dtype, device=self._device)
        self._values = torch.zeros(size, dtype=self._dtype, device=self._device)
        logger.info(
            "Drafter KV pool: %d bytes per token, %d slots, %.1f MB", self.bytes_per_token, slots, self.bytes / 1e6
        )

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` and ``values [D, N, Hk, Dh]`` of the tokens at ``slots [N]``."""
        self._keys[:, slots] = keys
        self._values[:, slots] = values

    def get_key_buffer(self, layer_id: int) -> Tensor:
        """Keys ``[P, Hk, Dh]`` of a drafter layer."""
        return self._keys[layer_id]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        """Values ``[P, Hk, Dh]`` of a drafter layer."""
        return self._values[layer_id]


class _Charge:
    """What the drafter's pool takes per token, added to the host's own price of a token."""

    bytes_per_token = 0


def _add_drafter(configurator: Any, kvc: Any) -> Any:
    """Add the drafter's bytes to the price per token by which the host sizes its pool (hook)."""
    if not kvc.is_draft_worker:
        configurator._cell_size += _Charge.bytes_per_token
        if "_draft_cell_size" in vars(configurator):  # pools with sliding-window layers keep the drafter's part apart
            configurator._draft_cell_size += _Charge.bytes_per_token
    return configurator


def charge(bytes_per_token: int) -> None:
    """Let the host count ``bytes_per_token`` of a drafter pool when it decides how many tokens fit in memory.

    Call it before the host allocates its pools.
    """
    _Charge.bytes_per_token = bytes_per_token
    _install()


@functools.cache
def _install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(SIZING_HOOK, _add_drafter, HookType.AFTER)
    HookRegistry.apply_hooks()
