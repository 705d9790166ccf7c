"""Every form against dense attention in fp32: batches 1, 3 and 8, ragged rows, both head sizes, 16 and 8 bit pools."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch
from cases import Case
from forms import CANDIDATES, SERVED, Run, clean_form, mask_form
from setting import Rows, Setting

from sglang_ext.serving.attention.flashinfer_calls import HeadShape, Kernels

#: Largest ``|difference| / (1 + |expected|)`` to fp32 that the rounding of weights and results explains.
LIMITS = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
SHAPES = tuple(
    HeadShape(32, 8, head_dim, head_dim**-0.5, dtype, kv_dtype)
    for head_dim, dtype, kv_dtype in (
        (128, torch.bfloat16, torch.bfloat16),
        (64, torch.bfloat16, torch.bfloat16),
        (128, torch.float16, torch.float16),
        (128, torch.bfloat16, torch.float8_e4m3fn),
        (64, torch.bfloat16, torch.float8_e4m3fn),
    )
)
"""Heads that are checked; the interval variant is compiled for the first alone."""

#: With keys and values in 8 bits mask rows' own keys stay in 16, except in the candidate, which rounds them too.
CANDIDATE_8_BIT = 2e-1


def run(setting: Setting, rows: Rows) -> None:
    """Check all forms."""
    kernels = Kernels(setting.library(), setting.device, 1024 if setting.dry else 256 << 20)
    # Candidates last: a kernel that breaks the process takes nothing that serves with it.
    for forms in (SERVED, CANDIDATES):
        _run(setting, rows, kernels, forms)


def _run(setting: Setting, rows: Rows, kernels: Kernels, forms: tuple[str, ...]) -> None:
    longest = 60 if setting.dry else 3000
    picked = random.Random(0)
    for shape in SHAPES[:4] if setting.dry else SHAPES:
        for batch in (1, 3) if setting.dry else (1, 3, 8):
            committed = [picked.randint(1, longest) for _ in range(batch)]
            widths = [picked.randint(1, 16) for _ in range(batch)]
            groups = [picked.randint(0, width) for width in widths]
            groups[0] = max(groups[0], 1)
            _check(setting, rows, kernels, shape, forms, (committed, widths, groups))


def _check(
    setting: Setting, rows: Rows, kernels: Kernels, shape: HeadShape, forms: tuple[str, ...], counts: tuple
) -> None:
    committed, widths, groups = counts
    seed = len(committed)
    parallel = Case(shape, *counts, 16, setting.device, seed=seed)
    block = Case(shape, committed, [0] * len(committed), [1] * len(committed), 16, setting.device, seed=seed)
    tree = Case(shape, committed, [max(widths)] * len(widths), groups, 16, setting.device, tree=True, seed=seed)
    limit = LIMITS[shape.dtype]
    name = f"{shape.head_dim} {shape.dtype} {shape.kv_dtype} x{len(committed)}".replace("torch.", "")
    for what, case in (("parallel", parallel), ("block", block), ("tree", tree)):
        expected = case.mask_oracle()
        for form in forms:
            candidate = form in CANDIDATES
            if candidate and what == "tree":
                continue  # siblings are not a prefix
            if form == "intervals" and (setting.dry or shape != SHAPES[0]):
                continue
            allowed = CANDIDATE_8_BIT if candidate and shape.kv_dtype != shape.dtype else limit
            _compare(rows, f"{what} {form} {name}", partial(mask_form, form, case, kernels), expected, allowed)
    for what, case in (("chain", parallel), ("tree", tree)) if forms == SERVED else ():
        _compare(rows, f"verify {what} {name}", partial(clean_form, case, kernels), case.clean_oracle(), limit)


def _compare(rows: Rows, name: str, plan: Callable[[], Run], expected: torch.Tensor, limit: float) -> None:
    """Plan a form and hold its numbers against the oracle's."""
    try:
        off = (plan()().float() - expected).abs()
        worst = float((off / (1 + expected.abs())).max())
    except Exception as problem:  # whatever it is, one form that cannot run must not hide the others
        rows.add(check=name, ok=False, error=f"{type(problem).__name__}: {problem}"[:300])
        return
    rows.add(check=name, ok=worst <= limit, worst=worst, limit=limit, max_error=float(off.max()),
             mean_error=float(off.mean()))  # fmt: skip
