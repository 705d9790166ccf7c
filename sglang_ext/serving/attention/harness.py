"""A paged pool and forward batches without a model, to run any attention backend of the host on its own.

Tests compare backends with a reference over it; ``sglang-ext bench-attention`` times them over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


SMOLLM2_135M = AttentionShape(heads=9, kv_heads=3, head_dim=64, dtype=torch.bfloat16)


def backends() -> dict[str, type]:
    """The host's CPU backend and ours, by the names they go by in reports."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from sglang_ext.serving.attention.sdpa import SdpaBackend

    return {"torch_native": TorchNativeAttnBackend, "sglang_ext": SdpaBackend}


class Pool:
    """Keys and values ``[slots, Hk, D]``, a copy per layer; layer ids past the last copy start over."""

    def __init__(self, keys: Tensor, values: Tensor, layers: int) -> None:
        self._keys = [keys, *(keys.clone() for _ in range(layers - 1))]
        self._values = [values, *(values.clone() for _ in range(layers - 1))]

    @property
    def keys(self) -> Tensor:
        """Layer 0's keys."""
        return self._keys[0]

    @property
    def values(self) -> Tensor:
        """Layer 0's values."""
        return self._values[0]

    def get_key_buffer(self, layer_id: int) -> Tensor:
        """A layer's keys."""
        return self._keys[layer_id % len(self._keys)]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        """A layer's values."""
        return self._values[layer_id % len(self._values)]

    def set_kv_buffer(self, layer: Any, where: Any, k: Tensor, v: Tensor) -> None:
        """Write rows at their slots."""
        keys, values = self.get_key_buffer(layer.layer_id), self.get_value_buffer(layer.layer_id)
        keys[where.loc] = k.view(-1, *keys.shape[1:])
        values[where.loc] = v.view(-1, *values.shape[1:])


class Harness:
    """Requests with random keys and values at random slots, or page-wise contiguous ones.

    Args:
        shape: heads of the layer.
        kv_lens: keys of each request after the pass.
        page_size: slots are handed out in pages of this many.
        seed: of keys, values and slots.
        layers: copies of the pool, so that timings do not read the same memory again and again.
    """

    def __init__(
        self, shape: AttentionShape, kv_lens: Sequence[int], *, page_size: int = 1, seed: int = 0, layers: int = 1
    ) -> None:
        self.shape, self.kv_lens = shape, list(kv_lens)
        random = torch.Generator().manual_seed(seed)
        pages = [-(-length // page_size) for length in kv_lens]
        self.slot_count = (sum(pages) + 1) * page_size
        order = torch.randperm(sum(pages), generator=random) + 1
        width = max(pages) * page_size
        table = torch.zeros(len(kv_lens) + 2, width, dtype=torch.int32)
        self.requests = torch.randperm(len(kv_lens) + 2, generator=random)[: len(kv_lens)]
        lane = torch.arange(page_size)
        for request, mine in zip(self.requests, order.split(pages), strict=True):
            slots = (mine[:, None] * page_size + lane).view(-1)
            table[request, : slots.numel()] = slots.to(torch.int32)
        size = (self.slot_count, shape.kv_heads, shape.head_dim)
        # Unwritten slots hold large values: a backend that reads a key it must not see shows it.
        keys, values = (torch.full(size, 300.0, dtype=shape.dtype) for _ in range(2))
        for pool in (keys, values):
            for request, length in zip(self.requests, kv_lens, strict=True):
                rows = torch.randn(length, *size[1:], generator=random).to(shape.dtype)
                pool[table[request, :length].long()] = rows
        self.pool = Pool(keys, values, layers)
        self.table = table
        self.runner = SimpleNamespace(
            device="cpu",
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            token_to_kv_pool=self.pool,
        )
        self.random = random

    def layer(self, *, window: int = -1, bidirectional: bool = False, layer_id: int = 0) -> SimpleNamespace:
        """An attention layer as backends see it."""
        shape = self.shape
        return SimpleNamespace(
            layer_id=layer_id,
            tp_q_head_num=shape.heads,
            tp_k_head_num=shape.kv_heads,
            qk_head_dim=shape.head_dim,
            v_head_dim=shape.head_dim,
            scaling=shape.head_dim**-0.5,
            sliding_window_size=window,
            is_cross_attention=False,
            attn_type=AttentionType.ENCODER_ONLY if bidirectional else AttentionType.DECODER,
            logit_cap=0.0,
        )

    def queries(self, query_lens: Sequence[int]) -> Tensor:
        """Random packed queries ``[sum(query_lens), Hq*D]``."""
        size = (sum(query_lens), self.shape.heads * self.shape.head_dim)
        return torch.randn(size, generator=self.random).to(self.shape.dtype)

    def new_rows(self, query_lens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys and values ``[rows, Hk, D]`` of the query rows, as a model would hand them over (already pooled)."""
        slots = self.own_slots(query_lens)
        return self.pool.keys[slots], self.pool.values[slots]

    def own_slots(self, query_lens: Sequence[int]) -> Tensor:
        """Slots of the query rows: the last ones of each request."""
        triples = zip(self.requests, self.kv_lens, query_lens, strict=True)
        return torch.cat([self.table[request, length - rows : length] for request, length, rows in triples]).long()

    def batch(self, mode: str, query_lens: Sequence[int], spec_info: Any = None) -> SimpleNamespace:
        """A forward batch: mode ``"decode"``, ``"extend"``, ``"mixed"`` or ``"verify"``."""
        rows = torch.tensor(list(query_lens))
        keys = torch.tensor(self.kv_lens)
        modes = {
            "decode": ForwardMode.DECODE,
            "extend": ForwardMode.EXTEND,
            "mixed": ForwardMode.MIXED,
            "verify": ForwardMode.TARGET_VERIFY,
        }
        return SimpleNamespace(
            forward_mode=modes[mode],
            batch_size=len(self.kv_lens),
            req_pool_indices=self.requests,
            seq_lens=keys - rows if mode == "verify" else keys,
            extend_prefix_lens=keys - rows,
            extend_seq_lens=rows,
            out_cache_loc=self.own_slots(query_lens),
            encoder_lens=None,
            spec_info=spec_info,
        )

    def run_pass(self, backend: Any, batch: Any, query: Tensor, rows: Sequence[int], layers: int) -> Tensor:
        """One forward pass as a model would make it: metadata once, then ``layers`` attention layers."""
        forward = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
        k, v = self.new_rows(rows)
        backend.init_forward_metadata(batch)
        for layer_id in range(layers):
            out = forward(query, k, v, self.layer(layer_id=layer_id), batch)
        return out
