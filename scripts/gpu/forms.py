"""The forms of attention that are checked and timed: those that serve, and two candidates beside them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from cases import Case
from row_intervals import interval_form
from torch import Tensor

from sglang_ext.core.mask_bits import Rows, mask_lengths, pack
from sglang_ext.serving.attention.flashinfer import FORMS, slots_of
from sglang_ext.serving.attention.flashinfer_calls import Kernels, MaskMode

SERVED = ("merged", "masked")
CANDIDATES = ("groups", "intervals")
"""Both need mask rows in the pool; the second is compiled on first use, and the twin cannot stand in for it."""

Run = Callable[[], Tensor]


def mask_form(name: str, case: Case, kernels: Kernels) -> Run:
    """Plan the case's mask rows in one form; the result runs one layer and returns ``[N, Hq * D]``."""
    if name == "groups":
        return _groups_as_entries(case, kernels)
    if name == "intervals":
        return interval_form(kernels.library, kernels.workspace, case)
    rows = FORMS[name](case.source, kernels, case.shape)
    meta = rows.prepare(case.requests, case.layout, 0)
    return lambda: rows.attend(case.layer, *case.rows, meta)


def clean_form(case: Case, kernels: Kernels) -> Run:
    """Plan the case's clean rows: causal for a chain, a custom mask for a tree."""
    queries, keys = mask_lengths(case.layout, Rows.CLEAN)
    tree = case.layout.parent is not None
    call = kernels.paged(MaskMode.CUSTOM if tree else MaskMode.CAUSAL, case.shape)
    slots = slots_of(case.table, case.requests, None, keys)
    call.plan(queries, keys, slots, pack(case.layout, Rows.CLEAN) if tree else None)
    return lambda: call.run(case.clean_q, case.pool_k, case.pool_v)[0].flatten(1)


def _groups_as_entries(case: Case, kernels: Kernels) -> Run:
    """Every group an entry of its own without a mask, its rows in the pool behind the clean ones.

    It reads the committed tokens once per group and needs pool slots for mask rows; a candidate, not served.
    """
    block = case.layout.block_size
    queries, keys, slots, own = [], [], [], []
    for i, (length, width) in enumerate(zip(case.lengths, case.layout.clean.carried)):
        committed = length - width
        for group in range(case.layout.groups.carried[i]):
            seen = committed + group + 1 if width else committed
            mine = case.table[i, length + group * block : length + (group + 1) * block]
            queries.append(block)
            keys.append(seen + block)
            slots += [case.table[i, :seen], mine]
            own.append(mine)
    call = kernels.paged(MaskMode.FULL, case.shape)
    call.plan(queries, keys, torch.cat(slots).to(torch.int32))
    where = torch.cat(own).long()
    q, k, v = case.rows

    def run() -> Tensor:
        case.pool_k[where] = k.to(case.shape.kv_dtype)
        case.pool_v[where] = v.to(case.shape.kv_dtype)
        return call.run(q, case.pool_k, case.pool_v)[0].flatten(1)

    return run
