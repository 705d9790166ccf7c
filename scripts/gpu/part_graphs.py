"""Microseconds of one layer's mask rows inside a CUDA graph, form by form; in a dry run, the plans alone."""

from __future__ import annotations

import itertools

from cases import Case
from forms import CANDIDATES, SERVED, mask_form
from part_kernels import SHAPES
from replay import replay_time
from setting import Rows, Setting

from sglang_ext.serving.attention.flashinfer_calls import Kernels


def run(setting: Setting, rows: Rows) -> None:
    """Time every cell of context x batch x groups."""
    shape = SHAPES[0]
    kernels = Kernels(setting.library(), setting.device, 1024 if setting.dry else 256 << 20)
    cells = [(64, 2, 4)] if setting.dry else list(itertools.product((1024, 4096, 32768), (1, 4, 16), (1, 4, 8, 16)))
    # Candidates last: a kernel that breaks the process takes nothing that serves with it.
    for forms, (context, batch, groups) in itertools.product((SERVED, CANDIDATES), cells):
        counts = [context] * batch, [groups] * batch, [groups] * batch
        case = Case(shape, *counts, 16, setting.device)
        for form in forms:
            if form == "intervals" and setting.dry:
                continue
            row = {"context": context, "batch": batch, "groups": groups, "form": form}
            try:
                call = mask_form(form, case, kernels)
                rows.add(**row, us=None if setting.dry else replay_time(call), ok=bool(call().isfinite().all()))
            except Exception as problem:  # a form that cannot be captured must not hide the others
                rows.add(**row, ok=False, error=f"{type(problem).__name__}: {problem}"[:300])
        del case
