"""Compiles what the later parts need, all of it side by side, so that none of them waits for a compiler.

FlashInfer's modules are built unless the archive has them (``make_bundle.py --prebuilt``). SGLang compiles kernels of
its own, and Triton ours, when a server first runs: shallow servers, in the shapes that follow, see to that.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from engines import DRAFTING_VARIANTS, PLAIN_VARIANTS, check_args, drafting_args, plain_args
from models import QWEN3_8B, TINY, write_flexdraft, write_tapped, write_target
from part_kernels import SHAPES
from row_intervals import JIT_KEYWORDS, jit_arguments
from servers import Ask, Job, ask_all
from setting import Rows, Setting

LIMIT = 150
"""Seconds for one server."""
PROMPTS = [[5, 6, 7], list(range(3, 130))]


def run(setting: Setting, rows: Rows) -> None:
    """Build modules and warm servers up at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = plan(Path(folder), setting)
        if setting.dry:
            modules(rows, build=False)
            for name, job in jobs.items():
                check_args(job.args)
                rows.add(server=name, dry="arguments and plan", ok=True)
            return
        with ThreadPoolExecutor(1) as beside:
            built = beside.submit(modules, rows, build=True)
            for name, outcome in ask_all(jobs, setting.work, at_once=len(jobs), limit=LIMIT).items():
                rows.add(server=name, **outcome.start, error=outcome.error, ok=outcome.error is None)
            built.result()


def modules(rows: Rows, *, build: bool) -> None:
    """Note which of FlashInfer's modules the archive has; build the others."""
    if importlib.util.find_spec("flashinfer") is None:
        rows.add(modules=None, left_out="FlashInfer is not installed", ok=not build)
        return
    if not build:
        os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")  # nothing to read it from
    from flashinfer.jit.attention.modules import (
        _gen_batch_prefill_primary_module,
        gen_customize_batch_prefill_module,
    )
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.jit.core import build_jit_specs

    specs = [gen_cascade_module()]
    for shape in SHAPES:
        types, size = (shape.dtype, shape.kv_dtype, shape.dtype), shape.head_dim
        specs.append(_gen_batch_prefill_primary_module("fa2", *types, torch.int32, size, size, 0, False, False, False))
    specs.append(gen_customize_batch_prefill_module("fa2", *jit_arguments(SHAPES[0]), **JIT_KEYWORDS))
    for spec in specs:
        rows.add(module=spec.name, prebuilt=spec.is_aot)
    if not build:
        return
    started = time.perf_counter()
    try:
        build_jit_specs(specs)
    except Exception as problem:  # servers are warmed up all the same
        rows.add(build="FlashInfer's modules", ok=False, error=f"{type(problem).__name__}: {problem}"[-2000:])
        return
    rows.add(build="FlashInfer's modules", seconds=round(time.perf_counter() - started, 1), ok=True)


def plan(base: Path, setting: Setting) -> dict[str, Job]:
    """Write shallow targets and drafters in the shapes to come; return the servers to start."""
    jobs: dict[str, Job] = {}
    shapes: dict[str, tuple[dict[str, Any], int]] = {"tiny": (TINY, 16), "8B": (QWEN3_8B, 512)}
    if setting.dry:
        del shapes["8B"]  # gigabytes
    for size, (shape, rank) in shapes.items():
        shallow = shape | {"num_hidden_layers": 4}
        target = write_target(base / size, shallow, weights=False)
        more: dict[str, Any] = {"load_format": "dummy", "context_length": 4096}
        for variant in PLAIN_VARIANTS:
            jobs[f"{size} plain {variant.name}"] = Job(plain_args(target, variant, **more), [_ask(None)])
        given: dict[str, Any] = {"block": 16, "device": setting.device}
        flexdraft = write_flexdraft(base / f"{size}-flexdraft", shallow, layers=1, rank=rank, **given)
        dflare = write_tapped(base / f"{size}-dflare", shallow, method="dflare", layers=1, taps=1, **given)
        options: dict[str, Any] = {"pruning": "none", "adaptive": False}
        for variant in DRAFTING_VARIANTS:
            args = drafting_args(target, variant, "FLEXDRAFT", flexdraft, options, **more)
            jobs[f"{size} flexdraft {variant.name}"] = Job(args, [_ask("parallel"), _ask("sequential")])
            args = drafting_args(target, variant, "DFLARE", dflare, options, **more)
            jobs[f"{size} dflare {variant.name}"] = Job(args, [_ask("sequential")])
    return jobs


def _ask(mode: str | None) -> Ask:
    return Ask("warm", PROMPTS, 12, None if mode is None else {"mode": mode})
