"""Verification of drafts through FlashInfer, planned from the host.

The host's own backend plans a verification from tensors on the GPU and waits for them three times. Our worker knows
every length, so :class:`ChainVerify`, mixed into the host's backend, plans the clean rows of a
:class:`~sglang_ext.core.block.BlockLayout` itself: a chain is causal and needs no mask, whatever the row counts; a
token tree takes a packed custom mask. Every other pass is the host's.

Shape legend: N clean rows, Hq query heads, Hk key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from sglang_ext.core.block import BlockLayout
from sglang_ext.core.mask_bits import Rows, mask_lengths, pack
from sglang_ext.serving.attention.flashinfer import slots_of
from sglang_ext.serving.attention.flashinfer_calls import HeadShape, Kernels, MaskMode, PagedCall
from sglang_ext.serving.verify_input import ChainVerifyInput

BACKEND_NAME = "flashinfer"


class ChainVerify:
    """Mixed into a host backend that has ``req_to_token_pool`` and ``token_to_kv_pool``."""

    req_to_token_pool: Any
    token_to_kv_pool: Any

    def use_calls(self, kernels: Kernels, shape: HeadShape) -> None:
        """Take the calls verification goes through."""
        self._shape = shape
        self._chains = [kernels.paged(MaskMode.CAUSAL, shape) for _ in range(2)]
        self._trees = [kernels.paged(MaskMode.CUSTOM, shape) for _ in range(2)]
        self._turn = 0
        self._planned: PagedCall | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a verification of ours here, anything else as the host does."""
        self._planned = None
        verify = forward_batch.spec_info
        ours = forward_batch.forward_mode.is_target_verify() and isinstance(verify, ChainVerifyInput)
        if ours and verify.layout is not None:
            self._planned = self._plan(forward_batch.req_pool_indices, verify.layout)
        else:
            super().init_forward_metadata(forward_batch)  # type: ignore[misc]

    @property
    def verify_shape(self) -> HeadShape:
        """Heads that verification is planned for."""
        return self._shape

    @contextmanager
    def verifying(self, call: PagedCall) -> Iterator[None]:
        """Attend clean rows through ``call``, which its owner plans, for as long as the context is open."""
        before, self._planned = self._planned, call
        try:
            yield
        finally:
            self._planned = before

    def _plan(self, requests: Tensor, layout: BlockLayout) -> PagedCall:
        queries, keys = mask_lengths(layout, Rows.CLEAN)
        self._turn = 1 - self._turn
        call = (self._chains if layout.parent is None else self._trees)[self._turn]
        slots = slots_of(self.req_to_token_pool.req_to_token, requests, None, keys)
        call.plan(queries, keys, slots, None if layout.parent is None else pack(layout, Rows.CLEAN))
        return call

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Write K/V to the pool, then attend; ``q`` is ``[N, Hq*D]`` and so is the result."""
        if self._planned is None:
            out: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)  # type: ignore[misc]
            return out
        shape = self._shape
        served = (layer.scaling, layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim)
        if served != (shape.scaling, shape.heads, shape.kv_heads, shape.head_dim) or kwargs:
            raise ValueError(
                f"layer {layer.layer_id} has (scaling, heads, kv heads, size) {served}; {shape} was planned"
            )
        if save_kv_cache and k is not None and v is not None:
            where = KVWriteLoc.for_layer(forward_batch, layer)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, *self._kv_write_scales(layer))
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        scales = (None, None) if shape.kv_dtype == shape.dtype else (layer.k_scale_float, layer.v_scale_float)
        found, _ = self._planned.run(q.view(-1, shape.heads, shape.head_dim).contiguous(), keys, values, *scales)
        return found.flatten(1)

    def _kv_write_scales(self, layer: Any) -> tuple[Any, Any]:
        """What the pool divides keys and values by; the host's backend knows."""
        scales: tuple[Any, Any] = super()._kv_write_scales(layer)  # type: ignore[misc]
        return scales


def install(kernels: Kernels) -> None:
    """Let this process's FlashInfer backends verify through :class:`ChainVerify`; call before they are built.

    Targets with sliding windows keep the host's own planning.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    stock = ATTENTION_BACKENDS[BACKEND_NAME]

    def make(runner: Any) -> Any:
        backend = stock(runner)
        return adopt(backend, kernels) if can_adopt(backend) else backend

    ATTENTION_BACKENDS[BACKEND_NAME] = make


def can_adopt(backend: Any) -> bool:
    """Return whether a host backend has one pool and one head shape for all layers."""
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    return type(backend) is FlashInferAttnBackend and backend.num_wrappers == 1


def adopt(backend: Any, kernels: Kernels) -> Any:
    """Return a backend that verifies through :class:`ChainVerify` and is the host's in all else, sharing its state."""
    updater = backend.indices_updater_prefill
    shape = HeadShape(
        updater.num_qo_heads,
        updater.num_kv_heads,
        updater.head_dim,
        updater.head_dim**-0.5,
        updater.q_data_type,
        updater.data_type,
    )
    shape.check()
    kernels.warm_up(shape)
    stock = type(backend)
    verifying: Any = object.__new__(type(f"Verifying{stock.__name__}", (ChainVerify, stock), {}))
    # The host's helpers keep a reference to the backend they were made by: both are one state.
    verifying.__dict__ = backend.__dict__
    verifying.use_calls(kernels, shape)
    return verifying
