"""Attention of a block of drafts: the drafter's own pool up to the last committed token, then the block itself.

A block is one mask group without clean rows beside it (:meth:`BlockLayout.sequential`), so who sees whom is the rule of
:mod:`sglang_ext.core.masks` and the arithmetic that of FlexDraft's mask rows; only the pool is another one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from sglang_ext.core.block import BlockLayout, mask_rows_mask
from sglang_ext.serving.attention.gather import Gather
from sglang_ext.serving.attention.inline import InlineMeta, InlineRows, attend_inline
from sglang_ext.serving.attention.mask_rows import MaskAttention
from sglang_ext.serving.drafter_pool import DrafterPool

GATHER_INDEX = -3
"""Scratch buffers of the drafter's keys and values, beside those of the target's rows."""


class SdpaBlockRows:
    """The :class:`~sglang_ext.serving.attention.mask_rows.MaskAttention` of the CPU over a drafter pool.

    Args:
        model_runner: the host's target runner; its backend may be built after construction.
        pool: the drafter's keys and values.
    """

    def __init__(self, model_runner: Any, pool: DrafterPool) -> None:
        self._runner = model_runner
        self._pool = pool

    def prepare(self, slots: Tensor, layout: BlockLayout, keys: int) -> InlineMeta:
        """Plan the blocks of ``layout`` for requests in ``slots [B]``; ``keys`` is not needed here."""
        backend = self._runner.attn_backend
        kv_lens = (layout.committed + layout.clean.counts).tolist()
        allowed = mask_rows_mask(layout, max(kv_lens))
        pool_slots = backend.request_slots(slots, range(len(kv_lens)), kv_lens)
        gather = Gather(GATHER_INDEX, pool_slots, backend.workspace)
        return InlineMeta(InlineRows(slots, kv_lens, allowed, gather), layout.mask)

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, meta: InlineMeta) -> Tensor:
        """Return ``[N, Hq * D]`` for flat block rows q ``[N, Hq, D]``, k and v ``[N, Hk, D]``."""
        plan, rows = meta
        assert plan.gather is not None
        padded = (rows.pad(q).flatten(0, 1), rows.pad(k).flatten(0, 1), rows.pad(v).flatten(0, 1))
        pools = (self._pool.get_key_buffer(layer.layer_id), self._pool.get_value_buffer(layer.layer_id), None)
        out = attend_inline(plan, plan.gather, pools, layer, padded, plan.gather.workspace)
        return rows.flatten(out.reshape(rows.batch, rows.width, -1))


def block_attention(
    model_runner: Any,
    pool: DrafterPool,
    on_gpu: Callable[[Any], MaskAttention] | None = None,
) -> MaskAttention:
    """Return the attention of blocks over ``pool`` on the runner's device.

    Args:
        model_runner: the host's target runner, whose slot table says where each token lives.
        pool: the drafter's keys and values.
        on_gpu: makes the attention of a GPU from an object with both pools; None where the host's backend is ours, on
            a CPU.
    """
    return SdpaBlockRows(model_runner, pool) if on_gpu is None else on_gpu(_PoolView(model_runner, pool))


class _PoolView(SimpleNamespace):
    """The target's slot table beside the drafter's pool, for attention that reads a runner's pool."""

    def __init__(self, model_runner: Any, pool: DrafterPool) -> None:
        super().__init__(token_to_kv_pool=pool, _runner=model_runner)

    @property
    def req_to_token_pool(self) -> Any:
        """The host's slot table, allocated after the drafter is built."""
        return self._runner.req_to_token_pool
