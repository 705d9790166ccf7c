"""A stand-in for FlashInfer in plain torch: same names, same arguments, read the way the kernels read them.

A plan is kept as the kernels would find it (index pointers, pool slots, last page lengths, mask bits with byte
offsets) and every call computes from that alone in fp32, so a wrong pointer, slot or bit shows as a wrong number. Every
plan is checked for dtypes, sizes and the side each tensor lives on, and is kept in :attr:`TwinLibrary.plans`.

On the meta device calls return empty tensors of the right shape. Nothing can be read back from that device, so a pass
that runs there has proved that it reads nothing back.

Shape legend: B requests, N query rows, S keys, Hq query heads, Hk key/value heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """The arguments of one ``plan`` call.

    Attributes:
        kind: ``paged`` or ``ragged``.
        qo: ``[B+1]`` query pointer as the host holds it.
        kv: ``[B+1]`` key (page) pointer as the host holds it.
        slots: page numbers of a paged call.
        last_page: ``[B]`` entries on the last page of a paged call.
        page_size: tokens on a page.
        mask: packed bits, or None.
        causal, sm_scale, q_dtype, kv_dtype: as passed.
        heads: Hq, Hk, D.
    """

    kind: str
    qo: list[int]
    kv: list[int]
    slots: Tensor | None
    last_page: list[int]
    page_size: int
    mask: Tensor | None
    causal: bool
    sm_scale: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    heads: tuple[int, int, int]

    @property
    def query_lens(self) -> list[int]:
        """Query rows per request."""
        return [stop - start for start, stop in zip(self.qo, self.qo[1:])]

    @property
    def key_lens(self) -> list[int]:
        """Keys per request."""
        pages = [stop - start for start, stop in zip(self.kv, self.kv[1:])]
        if self.kind == "ragged":
            return pages
        return [max(count - 1, 0) * self.page_size + last for count, last in zip(pages, self.last_page)]


def _host_pointer(name: str, tensor: Tensor) -> list[int]:
    """Check an index pointer and return it: int32, on the host, from 0, never falling."""
    if tensor.device.type != "cpu" or tensor.dtype != torch.int32 or tensor.dim() != 1:
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; int32 on the host is due")
    values = tensor.tolist()
    if values[0] != 0 or values != sorted(values):
        raise ValueError(f"{name} is {values}; it must start at 0 and never fall")
    return values


class _Wrapper:
    """What both wrappers share: mask bookkeeping, as the library does it, and the arithmetic."""

    kind = ""
    library: TwinLibrary

    def _make(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str,
        backend: str,
        use_cuda_graph: bool,
        mask_buffers: tuple[Tensor | None, Tensor | None],
        buffers: dict[str, Tensor | None],
    ) -> None:
        if float_workspace_buffer.dtype != torch.uint8 or kv_layout != "NHD" or backend != "fa2":
            raise ValueError(
                f"{float_workspace_buffer.dtype} workspace, {kv_layout}, {backend}: uint8, NHD, fa2 is due"
            )
        self.device = float_workspace_buffer.device
        self._custom_mask_buf, self._mask_indptr_buf = mask_buffers
        self._buffers = {name: buffer for name, buffer in buffers.items() if buffer is not None}
        self._graph: int | None = None
        self._plan: Plan | None = None
        if use_cuda_graph:
            if len(self._buffers) < len(buffers):
                raise ValueError(f"a graph needs {sorted(buffers)}; only {sorted(self._buffers)} were given")
            # What a captured call reads is found under this number in every replay.
            self._graph = len(_IN_GRAPHS)
            _IN_GRAPHS.append(self)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Take other scratch buffers; this one needs none."""
        for scratch in (float_workspace_buffer, int_workspace_buffer):
            if scratch.dtype != torch.uint8 or scratch.device != self.device:
                raise ValueError(f"scratch is {scratch.dtype} on {scratch.device}; uint8 on {self.device} is due")

    def _keep_in_graph(self, plan: Plan, pointers: dict[str, list[int]]) -> None:
        """Copy a plan into the buffers a captured call reads; sizes must be those of the first plan."""
        if self._plan is not None and (len(plan.qo), plan.qo[-1]) != (len(self._plan.qo), self._plan.qo[-1]):
            raise ValueError(f"rows {plan.qo} were planned in a graph of rows {self._plan.qo}")
        for name, values in pointers.items():
            self._buffers[name].copy_(torch.tensor(values, dtype=torch.int32))
        if plan.mask is not None:
            if self._custom_mask_buf is None or self._custom_mask_buf.numel() < plan.mask.numel():
                raise ValueError(f"{plan.mask.numel()} mask bytes were planned in a graph with too few")
            self._custom_mask_buf[: plan.mask.numel()] = plan.mask
        elif self._custom_mask_buf is not None:
            raise ValueError("a graph with a mask was planned without one; it would go on using the old bits")

    def _keep(self, plan: Plan) -> None:
        if plan.mask is not None:
            if plan.mask.dtype != torch.uint8 or plan.mask.device != self.device:
                raise ValueError(
                    f"mask bits are {plan.mask.dtype} on {plan.mask.device}; uint8 on {self.device} is due"
                )
            sizes = [q * s for q, s in zip(plan.query_lens, plan.key_lens)]
            if plan.mask.numel() != sum((size + 7) // 8 for size in sizes):
                raise ValueError(f"{plan.mask.numel()} mask bytes for requests of {sizes} entries")
            if self._graph is None:
                self._custom_mask_buf = plan.mask
            # In bits, as the library leaves it when it is handed packed bits: wrong from the second request on.
            bits = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32)
            if self._graph is None:
                self._mask_indptr_buf = bits.to(self.device)
            else:
                assert self._mask_indptr_buf is not None
                self._mask_indptr_buf.copy_(bits)
        elif self.kind == "paged" and self._graph is None:
            self._custom_mask_buf = self._mask_indptr_buf = None
        # A ragged wrapper never forgets a mask.
        if plan.q_dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(f"queries are planned in {plan.q_dtype}")
        self._plan = plan
        self.library.plans.append(plan)

    def _attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor], k_scale: float | None) -> Any:
        """Attend request by request in fp32; ``keys`` and ``values`` are ``[S, Hk, D]`` each."""
        plan = self._plan
        assert plan is not None
        outs, sums = [], []
        for i, (k, v) in enumerate(zip(keys, values, strict=True)):
            rows = q[plan.qo[i] : plan.qo[i + 1]].float()
            group = plan.heads[0] // plan.heads[1]
            k, v = (part.float().repeat_interleave(group, 1) for part in (k, v))
            scores = torch.einsum("qhd,shd->qhs", rows, k) * plan.sm_scale * (1.0 if k_scale is None else k_scale)
            scores = scores.masked_fill(~self._seen(i, rows.shape[0], k.shape[0])[:, None], -math.inf)
            lse = scores.logsumexp(-1) if k.shape[0] else scores.new_full(scores.shape[:2], -math.inf)
            weights = torch.where(lse.isinf()[..., None], 0.0, (scores - lse[..., None]).exp())
            outs.append(torch.einsum("qhs,shd->qhd", weights, v))
            sums.append(lse / math.log(2.0))
        return torch.cat(outs).to(plan.q_dtype), torch.cat(sums)

    def _seen(self, request: int, rows: int, keys: int) -> Tensor:
        plan = self._plan
        assert plan is not None
        if self._custom_mask_buf is None:
            if not plan.causal:
                return torch.ones(rows, keys, dtype=torch.bool)
            return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        assert self._mask_indptr_buf is not None
        entry = torch.arange(rows * keys)
        byte = self._custom_mask_buf[int(self._mask_indptr_buf[request]) + entry // 8]
        return ((byte >> (entry % 8)) & 1).bool().view(rows, keys)

    def _empty(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)


class _Paged(_Wrapper):
    """Stands in for ``BatchPrefillWithPagedKVCacheWrapper``."""

    kind = "paged"

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        masks = (custom_mask_buf, mask_indptr_buf)
        self._make(float_workspace_buffer, kv_layout, backend, use_cuda_graph, masks, buffers)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """Keep a plan over pages of the pool."""
        kv = _host_pointer("paged_kv_indptr", paged_kv_indptr)
        qo = _host_pointer("qo_indptr", qo_indptr)
        slots = paged_kv_indices
        if slots.dtype != torch.int32 or slots.device != self.device or slots.numel() < kv[-1]:
            raise ValueError(f"{slots.numel()} page numbers, {slots.dtype} on {slots.device}, for {kv[-1]} pages")
        if paged_kv_last_page_len.device.type != "cpu" or paged_kv_last_page_len.dtype != torch.int32:
            raise ValueError("last page lengths must be int32 on the host")
        heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        last = paged_kv_last_page_len.tolist()
        types = (q_data_type, kv_data_type)
        if self._graph is not None:
            room = self._buffers["paged_kv_indices_buf"]
            if room.numel() < kv[-1]:
                raise ValueError(f"{kv[-1]} pages were planned in a graph with room for {room.numel()}")
            room[: kv[-1]] = slots[: kv[-1]]
            slots = room[: kv[-1]]
        plan = Plan(self.kind, qo, kv, slots, last, page_size, packed_custom_mask, causal, sm_scale, *types, heads)
        if self._graph is not None:
            pointers = {"qo_indptr_buf": qo, "paged_kv_indptr_buf": kv, "paged_kv_last_page_len_buf": last}
            self._keep_in_graph(plan, pointers)
        self._keep(plan)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attend over the planned pages of ``(keys, values)``, each ``[pages, page_size, Hk, D]``."""
        plan = self._plan
        assert plan is not None
        assert plan.slots is not None
        assert return_lse
        for pool in paged_kv_cache:
            if pool.shape[1:] != (plan.page_size, *plan.heads[1:]) or pool.dtype != plan.kv_dtype:
                raise ValueError(f"a pool of {pool.dtype} {tuple(pool.shape)} is not what was planned")
        if q.device.type == "meta":
            return self._empty(q)
        if self._graph is not None:
            return _attend_in_graph(self._graph, q, *paged_kv_cache, k_scale, v_scale)
        return self.attend(q, *paged_kv_cache, k_scale, v_scale)

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, k_scale: float | None, v_scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Attend by the plan of the moment."""
        assert self._plan is not None
        own_keys, own_values = (self._rows(self._plan, pool) for pool in (keys, values))
        out, lse = self._attend(q, own_keys, own_values, k_scale)
        return out if v_scale is None else out * v_scale, lse

    @staticmethod
    def _rows(plan: Plan, pool: Tensor) -> list[Tensor]:
        """The planned rows of each request, ``[S, Hk, D]``."""
        assert plan.slots is not None
        pages = plan.slots.long().split([stop - start for start, stop in zip(plan.kv, plan.kv[1:])])
        return [pool[own].flatten(0, 1)[:length] for own, length in zip(pages, plan.key_lens, strict=True)]


class _Ragged(_Wrapper):
    """Stands in for ``BatchPrefillWithRaggedKVCacheWrapper``."""

    kind = "ragged"

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = {"qo_indptr_buf": qo_indptr_buf, "kv_indptr_buf": kv_indptr_buf}
        masks = (custom_mask_buf, mask_indptr_buf)
        self._make(float_workspace_buffer, kv_layout, backend, use_cuda_graph, masks, buffers)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """Keep a plan over packed keys."""
        qo, kv = _host_pointer("qo_indptr", qo_indptr), _host_pointer("kv_indptr", kv_indptr)
        heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        types = (q_data_type, kv_data_type)
        plan = Plan(self.kind, qo, kv, None, [], 1, packed_custom_mask, causal, sm_scale, *types, heads)
        if self._graph is not None:
            self._keep_in_graph(plan, {"qo_indptr_buf": qo, "kv_indptr_buf": kv})
        self._keep(plan)

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False) -> Any:
        """Attend over packed keys and values ``[S, Hk, D]``."""
        plan = self._plan
        assert plan is not None
        assert return_lse
        if k.dtype != plan.kv_dtype or not k.is_contiguous() or not v.is_contiguous():
            raise ValueError(f"keys are {k.dtype}, contiguous: {k.is_contiguous()}")
        if q.device.type == "meta":
            return self._empty(q)
        if self._graph is not None:
            return _attend_in_graph(self._graph, q, k, v, None, None)
        return self.attend(q, k, v, None, None)

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, k_scale: float | None, v_scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Attend by the plan of the moment."""
        assert self._plan is not None
        lengths = self._plan.key_lens
        return self._attend(q, list(keys.split(lengths)), list(values.split(lengths)), k_scale)


_IN_GRAPHS: list[Any] = []
"""Wrappers made for graphs, by number: a captured call is one operation that looks its plan up when it is replayed."""


@torch.library.custom_op("sglang_ext_twin::attend", mutates_args=())
def _attend_in_graph(
    number: int, q: Tensor, keys: Tensor, values: Tensor, k_scale: float | None, v_scale: float | None
) -> tuple[Tensor, Tensor]:
    out, lse = _IN_GRAPHS[number].attend(q, keys, values, k_scale, v_scale)
    return out, lse


class TwinLibrary:
    """Stands in for the module ``flashinfer``.

    Attributes:
        plans: every plan made by wrappers of this object, in order.
        merges: number of merges.
    """

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.merges = 0
        self.BatchPrefillWithPagedKVCacheWrapper = type("Paged", (_Paged,), {"library": self})
        self.BatchPrefillWithRaggedKVCacheWrapper = type("Ragged", (_Ragged,), {"library": self})

    def merge_state(self, v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
        """Merge attention over two sets of keys; LSE in base 2, -inf where a row saw nothing."""
        self.merges += 1
        for values, sums in ((v_a, s_a), (v_b, s_b)):
            if sums.dtype != torch.float32 or sums.shape != values.shape[:2]:
                raise ValueError(f"an LSE of {sums.dtype} {tuple(sums.shape)} beside {tuple(values.shape)} outputs")
        top = torch.maximum(s_a, s_b)
        safe = torch.where(top.isinf(), torch.zeros_like(top), top)
        first, second = (s_a - safe).exp2(), (s_b - safe).exp2()
        total = first + second
        share = torch.where(total > 0, first / total, torch.zeros_like(total)).unsqueeze(-1)
        rest = torch.where(total > 0, second / total, torch.zeros_like(total)).unsqueeze(-1)
        return (v_a.float() * share + v_b.float() * rest).to(v_a.dtype), total.log2() + safe
