"""A candidate form: one call whose mask is computed in the kernel from two key intervals per query row.

It is a variant of FlashInfer's ``fa2`` kernels that owns its mask: no bits are packed, and rows of 16 bytes say what a
query sees, ``[first, first + count)`` of the keys twice. Mask rows need slots in the pool, so it is timed, not served.
It is compiled on first use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cases import Case
from torch import Tensor

from sglang_ext.core.mask_bits import Rows, mask_lengths
from sglang_ext.kernels.pool_slots import row_numbers, slots_of
from sglang_ext.serving.attention.flashinfer_calls import BACKEND, LAYOUT, HeadShape, pointer

NAME = "SeenIntervals"
VERSION = 1
DECLARATION = r"""
struct SeenIntervals : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t qo_len, kv_len, window_left, shared_keys;
  int32_t first_row;
  float sm_scale_log2;
  template <typename Params>
  __device__ __host__ SeenIntervals(const Params& params, uint32_t batch_idx, uint8_t*) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    first_row = params.q_indptr[batch_idx];
    shared_keys = uint32_t(params.shared_keys[batch_idx]);
    sm_scale_log2 = params.sm_scale * math::log2e;
  }
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if (kv_idx < shared_keys) return true;
    const uint32_t row = qo_idx < qo_len ? qo_idx : qo_len - 1;
    const uint4 seen = __ldg(reinterpret_cast<const uint4*>(params.intervals) + (first_row + int32_t(row)));
    return bool(int((kv_idx - seen.x) < seen.y) | int((kv_idx - seen.z) < seen.w));
  })
};
"""


def jit_arguments(shape: HeadShape) -> list[Any]:
    """Return what the library needs to compile the variant; the first entry names the build."""
    types = (shape.dtype, shape.kv_dtype, shape.dtype)
    names = "_".join(str(dtype).removeprefix("torch.") for dtype in types[:2])
    name = f"seen_intervals_v{VERSION}_{names}_{shape.head_dim}"
    tensors, scalars = (["intervals", "shared_keys"], ["int32_t", "int32_t"]), (["sm_scale"], ["double"])
    sizes = (shape.head_dim, shape.head_dim)
    return [name, *types, torch.int32, *sizes, *tensors, *scalars, NAME, DECLARATION]


JIT_KEYWORDS = {"paged_kv_stride_mode": "equal", "module_surface": "full"}


def interval_table(case: Case) -> Tensor:
    """Return ``[N, 4]`` int32: first key and count of what each mask row sees, the clean keys, then its own group."""
    layout = case.layout
    request, column = row_numbers(layout.mask.carried, layout.committed.device)
    group = column // layout.block_size
    seen = layout.anchors[request, group] + 1
    own = torch.tensor(case.lengths, device=seen.device)[request] + group * layout.block_size
    zero = torch.zeros_like(seen)
    return torch.stack([zero, seen, own, zero + layout.block_size], 1).to(torch.int32).contiguous()


def interval_form(library: Any, workspace: Tensor, case: Case) -> Callable[[], Tensor]:
    """Plan a chain's mask rows, all of them in the pool; the result runs one layer and returns ``[N, Hq * D]``."""
    shape = case.shape
    kept = [i for i, rows in enumerate(case.layout.mask.carried) if rows]
    own, keys = (tuple(part[i] for i in kept) for part in mask_lengths(case.layout, Rows.MASK))
    requests = case.requests[torch.tensor(kept, device=case.requests.device)]
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
        workspace, LAYOUT, backend=BACKEND, jit_args=jit_arguments(shape), jit_kwargs=JIT_KEYWORDS,
        variant_owns_mask=True,
    )  # fmt: skip
    wrapper.plan(
        pointer(own),
        pointer(keys),
        slots_of(case.table, requests, None, keys),
        torch.ones(len(keys), dtype=torch.int32),
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        1,
        sm_scale=shape.scaling,
        q_data_type=shape.dtype,
        kv_data_type=shape.kv_dtype,
    )
    first = torch.tensor([case.lengths[i] for i in kept], device=case.requests.device)
    where = slots_of(case.table, requests, first, own).long()
    shared = case.layout.committed[torch.tensor(kept, device=first.device)].to(torch.int32)
    table = interval_table(case)
    q, k, v = case.rows

    def run() -> Tensor:
        case.pool_k[where] = k.to(shape.kv_dtype)
        case.pool_v[where] = v.to(shape.kv_dtype)
        pools = (case.pool_k.unsqueeze(1), case.pool_v.unsqueeze(1))
        out: Tensor = wrapper.run(q, pools, table, shared)
        return out.flatten(1)

    return run
