"""The CPU attention backend: one batched product for requests with few rows, chunks of rows for long ones.

It takes the place of the host's ``torch_native`` backend (same registry name, so checks by name keep working) and
serves plain decoding, extends (chunked prefill, radix-cached prefixes, mixed batches), target verification (chains,
ragged chains, foreign tree masks), sliding windows, attention sinks and bidirectional layers.

What is the same for all layers of a forward pass is built once, in :meth:`SdpaBackend.init_forward_metadata`: a
:class:`ForwardPlan` that splits the batch into dense groups (see :mod:`.dense`) and long requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from sglang_ext.core.masks import CLEAN, visible
from sglang_ext.serving.attention.dense import (
    HIDDEN,
    DenseGroup,
    attend_tail,
    fold_heads,
    sink_rows,
    split_by_length,
    unfold_heads,
)
from sglang_ext.serving.attention.gather import Gather, Translate, Workspace, padded_columns
from sglang_ext.serving.attention.inline import InlineRows, attend_inline

LONG_CHUNK = 128
"""Query rows of a long request attended at once: bounds the scores and skips keys that no row of a chunk can see."""

LONG_INDEX = -1
INLINE_INDEX = -2
"""Scratch buffers of long requests and of mask rows, beside those of the dense groups (0, 1, 2)."""


class LongRequest:
    """A request with many query rows: ``rows`` of them from packed row ``first_row``, over ``kv_len`` keys."""

    def __init__(self, first_row: int, rows: int, kv_len: int, gather: Gather) -> None:
        self.first_row = first_row
        self.rows = rows
        self.kv_len = kv_len
        self.gather = gather
        self._tails: dict[tuple[int, bool, int | None, torch.dtype], tuple[int, Tensor]] = {}

    def tail(self, start: int, stop: int, causal: bool, window: int | None, dtype: torch.dtype) -> tuple[int, Tensor]:
        """Return how many key columns rows ``start..stop-1`` read, and the additive mask of the last of them.

        Without a window a chunk sees every key before its own rows, so only the columns from there on are masked.
        """
        key = (start, causal, window, dtype)
        if key not in self._tails:
            first = self.kv_len - self.rows + start
            columns = padded_columns(first + stop - start) if causal else self.gather.columns
            masked_from = 0 if window is not None or not causal else first
            position = torch.arange(masked_from, columns)
            position = torch.where(position < self.kv_len, position, HIDDEN)
            query = torch.arange(first, first + stop - start)
            anchor = query if causal else torch.full_like(query, self.kv_len - 1)
            seen = visible(anchor, torch.full_like(anchor, CLEAN), position, torch.full_like(position, CLEAN))
            if window is not None:
                seen &= position >= query[:, None] - window
            self._tails[key] = (columns, torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf")))
        return self._tails[key]


@dataclass
class ForwardPlan:
    """One forward pass: the batch split into dense groups and long requests."""

    requests: Tensor
    groups: list[DenseGroup]
    long: list[LongRequest]
    whole: bool
    """True if one dense group holds every request in batch order, so no rows need scattering."""


def query_lengths(forward_batch: Any) -> list[int]:
    """Return the query rows of each request, as python integers."""
    mode = forward_batch.forward_mode
    if mode.is_decode():
        return [1] * forward_batch.batch_size
    if mode.is_target_verify():
        spec = forward_batch.spec_info
        if hasattr(spec, "verify_lens_cpu") and spec.verify_lens_cpu:
            return list(spec.verify_lens_cpu)
        return [spec.draft_token_num] * forward_batch.batch_size
    return forward_batch.extend_seq_lens.tolist()


def foreign_masks(forward_batch: Any, query_lens: Sequence[int], kv_lens: Sequence[int]) -> list[Tensor] | None:
    """Split a verify input's flat tree mask into one ``[rows, keys]`` per request; None if it has none."""
    if not forward_batch.forward_mode.is_target_verify() or forward_batch.spec_info.custom_mask is None:
        return None
    sizes = [rows * keys for rows, keys in zip(query_lens, kv_lens, strict=True)]
    parts = forward_batch.spec_info.custom_mask[: sum(sizes)].bool().split(sizes)
    return [part.view(rows, -1) for part, rows in zip(parts, query_lens, strict=True)]


class SdpaBackend(TorchNativeAttnBackend):
    """Attention over the host's paged pool on a CPU."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.workspace = Workspace()
        self.plan = ForwardPlan(torch.empty(0, dtype=torch.int64), [], [], False)
        self._swa_layers = (
            {layer for layer, (_, is_swa) in self.token_to_kv_pool.layers_mapping.items() if is_swa}
            if self.use_sliding_window_kv_pool
            else set()
        )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Build the plan every layer of this forward pass shares."""
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_idle():
            self.plan = ForwardPlan(torch.empty(0, dtype=torch.int64), [], [], False)
            return
        query_lens = query_lengths(forward_batch)
        kv_lens = forward_batch.seq_lens.tolist()
        # Prompts are attended one by one; rows of the same length or nearly so (decode, verification) together.
        most_rows = 1
        if forward_batch.forward_mode.is_target_verify():
            kv_lens = [keys + rows for keys, rows in zip(kv_lens, query_lens, strict=True)]
            most_rows = max(query_lens)
        masks = foreign_masks(forward_batch, query_lens, kv_lens)
        self.plan = self._build_plan(forward_batch.req_pool_indices, query_lens, kv_lens, most_rows, masks)

    def _build_plan(
        self,
        requests: Tensor,
        query_lens: list[int],
        kv_lens: list[int],
        most_rows: int,
        masks: list[Tensor] | None = None,
    ) -> ForwardPlan:
        first_rows = [0]
        for rows in query_lens:
            first_rows.append(first_rows[-1] + rows)
        few = [n for n, rows in enumerate(query_lens) if 0 < rows <= most_rows]
        long = [
            LongRequest(
                first_rows[n],
                rows,
                kv_lens[n],
                Gather(LONG_INDEX, self.request_slots(requests, [n], [kv_lens[n]]), self.workspace),
            )
            for n, rows in enumerate(query_lens)
            if rows > most_rows
        ]
        groups = []
        for index, bucket in enumerate(split_by_length([kv_lens[n] for n in few]) if few else []):
            members = [few[n] for n in bucket]
            groups.append(
                DenseGroup(
                    index,
                    self.request_slots(requests, members, [kv_lens[n] for n in members]),
                    [kv_lens[n] for n in members],
                    [query_lens[n] for n in members],
                    [first_rows[n] for n in members],
                    self.workspace,
                    None if masks is None else [masks[n] for n in members],
                )
            )
        return ForwardPlan(requests, groups, long, len(groups) == 1 and len(few) == len(query_lens))

    def request_slots(self, requests: Tensor, members: Sequence[int], kv_lens: Sequence[int]) -> Tensor:
        """``[B, S]`` pool slots of the members' keys, padded with each request's first slot."""
        chosen = requests if len(members) == requests.numel() else requests[torch.tensor(members)]
        table = self.req_to_token_pool.req_to_token
        columns = padded_columns(max(kv_lens))
        slots = table[chosen, : min(columns, table.shape[1])].long()
        if slots.shape[1] < columns:
            slots = torch.cat([slots, slots[:, :1].expand(-1, columns - slots.shape[1])], 1)
        outside = torch.arange(columns) >= torch.tensor(kv_lens)[:, None]
        return torch.where(outside, slots[:, :1], slots)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write K/V to the pool, then attend; ``q`` is ``[rows, Hq*D]`` and so is the result."""
        if layer.is_cross_attention or forward_batch.encoder_lens is not None:
            if forward_batch.forward_mode.is_decode():
                return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if layer.logit_cap:
            raise NotImplementedError(
                f"layer {layer.layer_id} caps attention logits at {layer.logit_cap}; the CPU backend of sglang_ext "
                "serves models without logit caps: choose another target or run on a GPU"
            )
        if save_kv_cache and k is not None and v is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        window = layer.sliding_window_size if causal and layer.sliding_window_size > -1 else None
        if self.plan.whole and not self.plan.long:
            out = self._attend_group(self.plan.groups[0], query, layer, causal, window, sinks)
            return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)
        out = q.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for group in self.plan.groups:
            out[group.own_rows] = self._attend_group(group, query, layer, causal, window, sinks)
        for request in self.plan.long:
            rows = slice(request.first_row, request.first_row + request.rows)
            self._attend_long(request, query[rows], out[rows], layer, causal, window, sinks)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """One row per request; the same arithmetic as verification, so both agree to rounding."""
        q = q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim)
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, sinks)

    def prepare_mask_rows(self, requests: Tensor, kv_lens: list[int], allowed: Tensor) -> InlineRows:
        """Plan mask rows that ride along with the next verification, or run alone.

        Args:
            requests: ``[B]`` rows of the host's slot table.
            kv_lens: pooled keys of each request the mask rows may see, verify rows of the same pass included.
            allowed: ``[B, R, S + R]`` bool, S the largest of ``kv_lens``: pooled keys first, then the mask rows.
        """
        return InlineRows(requests, kv_lens, allowed)

    def attend_mask_rows(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, plan: InlineRows) -> Tensor:
        """Attend padded mask rows over pooled and inline keys; returns ``[B*R, Hq, Dv]``.

        Clean rows of the same pass and layer must be in the pool already.

        Args:
            layer: the host's attention layer.
            q: ``[B*R, Hq, D]``.
            k, v: ``[B*R, Hk, D]``, never written to the pool.
            plan: of :meth:`prepare_mask_rows`.
        """
        if plan.gather is None:
            plan.gather = self._shared_gather(plan)
        return attend_inline(plan, plan.gather, self.pools(layer), layer, (q, k, v), self.workspace)

    def _shared_gather(self, plan: InlineRows) -> Gather:
        """The verify rows' own gather if they read the same keys of the same requests, else a new one."""
        if self.plan.whole and not self.plan.long:
            group = self.plan.groups[0]
            if group.kv_lens == plan.kv_lens and torch.equal(self.plan.requests, plan.requests):
                return group.gather
        slots = self.request_slots(plan.requests, range(len(plan.kv_lens)), plan.kv_lens)
        return Gather(INLINE_INDEX, slots, self.workspace)

    def pools(self, layer: Any) -> tuple[Tensor, Tensor, Translate | None]:
        """Key pool, value pool ``[slots, Hk, D]`` and slot translation of a layer."""
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        swa = layer.layer_id in self._swa_layers
        return keys, values, self.token_to_kv_pool.translate_loc_from_full_to_swa if swa else None

    def _attend_group(
        self, group: DenseGroup, query: Tensor, layer: Any, causal: bool, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """Attend one dense group; returns its rows ``[rows, Hq, Dv]`` in packed order."""
        kv_heads = layer.tp_k_head_num
        source = group.gather.read(layer.layer_id, *self.pools(layer))
        kernel = group.kernel(source, causal, window, layer.tp_q_head_num, query.dtype)
        rows = query if self.plan.whole and group.valid is None else query[group.packed]
        sink = None if sinks is None else sink_rows(sinks, group.batch, group.rows, kv_heads)
        out = kernel.attend(fold_heads(rows, group.rows, kv_heads), layer.scaling, sink)
        out = unfold_heads(out, group.rows, kv_heads)
        return out if group.valid is None else out[group.valid]

    def _attend_long(
        self,
        request: LongRequest,
        query: Tensor,
        out: Tensor,
        layer: Any,
        causal: bool,
        window: int | None,
        sinks: Tensor | None,
    ) -> None:
        """Attend one long request into ``out`` ``[rows, Hq, Dv]``; prefix rows are read, never recomputed."""
        kv_heads = layer.tp_k_head_num
        source = request.gather.read(layer.layer_id, *self.pools(layer))
        keys, values = source.keys.to(query.dtype), source.values.to(query.dtype)
        for start in range(0, request.rows, LONG_CHUNK):
            stop = min(request.rows, start + LONG_CHUNK)
            columns, tail = request.tail(start, stop, causal, window, query.dtype)
            sink = None if sinks is None else sink_rows(sinks, 1, stop - start, kv_heads)
            folded = fold_heads(query[start:stop], stop - start, kv_heads)
            found = attend_tail(
                folded, keys[:, :columns], values[:, :columns], tail, layer.scaling, sink, self.workspace
            )
            out[start:stop] = unfold_heads(found, stop - start, kv_heads)
