"""Microseconds of one layer's mask rows inside a CUDA graph, form by form; in a dry run, the plans alone."""

from __future__ import annotations

import itertools

import torch
from cases import Case
from forms import CANDIDATES, SERVED, mask_form
from replay import replay_time
from setting import Rows, Setting

from sglang_ext.serving.attention.flashinfer_calls import HeadShape, Kernels

LARGEST_POOL = 300_000
"""Tokens; larger cells are left out, as their pool alone would fill the device."""


def run(setting: Setting, rows: Rows) -> None:
    """Time every cell of context x batch x groups."""
    shape = HeadShape(32, 8, 128, 128**-0.5, torch.bfloat16, torch.bfloat16)
    kernels = Kernels(setting.library(), setting.device, 1024 if setting.dry else 256 << 20)
    cells = itertools.product((1024, 4096, 32768), (1, 4, 16), (1, 4, 8, 16))
    for context, batch, groups in [(64, 2, 4)] if setting.dry else cells:
        if context * batch > LARGEST_POOL:
            rows.add(context=context, batch=batch, groups=groups, left_out="pool")
            continue
        counts = [context] * batch, [groups] * batch, [groups] * batch
        case = Case(shape, *counts, 16, setting.device)
        for form in (*SERVED, *CANDIDATES):
            if form == "intervals" and setting.dry:
                continue
            row = {"context": context, "batch": batch, "groups": groups, "form": form}
            try:
                call = mask_form(form, case, kernels)
                rows.add(**row, us=None if setting.dry else replay_time(call), ok=bool(call().isfinite().all()))
            except Exception as problem:  # a form that cannot be captured must not hide the others
                rows.add(**row, ok=False, error=f"{type(problem).__name__}: {problem}"[:300])
        del case
