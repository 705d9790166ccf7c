"""Step times of a random Qwen3-8B, and the speedup they allow as a function of the accept length.

With random weights drafts are never right: every step commits one token, and its time is all that is measured.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

from engines import Engine, check_args, drafting_args, plain_args
from models import QWEN3_8B, TINY, write_flexdraft, write_tapped, write_target
from setting import Rows, Setting

BATCHES = (1, 2, 4, 8, 16)
CONTEXT = 1024
SHORT, LONG = 8, 40
"""Tokens of two runs whose difference leaves the prefill out."""

ACCEPT_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 7.3, 8)
"""Tokens per step; 7.3 is what independent runs of the published FlexDraft drafter for Qwen3-8B reach on GSM8K."""

FLOORS_MS = {"plain": 3.15, "parallel pruned": 3.45, "sequential": 4.25, "dflare": 4.00}
"""Reading every weight once at the bandwidth of an H200, batch 1: no step can be faster."""


def run(setting: Setting, rows: Rows) -> None:
    """Measure plain decoding and every way of drafting."""
    shape = TINY if setting.dry else QWEN3_8B
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        target = write_target(base / "target", shape, weights=False)
        layers, block = (2, 8) if setting.dry else (10, 16)
        depth, taps = (2, 1) if setting.dry else (5, 5)
        flexdraft = write_flexdraft(base / "flexdraft", shape, layers=layers, block=block, rank=512)
        tapped = {
            method: write_tapped(base / method, shape, method=method, layers=depth, taps=taps, block=block)
            for method in ("dflare", "dflash")
        }
        servers = _servers(target, flexdraft, tapped)
        if setting.dry:
            for name, (args, _) in servers.items():
                check_args(args)
                rows.add(server=name, dry="arguments and plan", ok=True)
            _speedups(rows, {("plain graphs", 1): 2.0, ("parallel full", 1): 4.0})
            return
        _speedups(rows, _measure(rows, servers))


def _servers(target: Path, flexdraft: Path, tapped: dict[str, Path]) -> dict[str, Any]:
    """Name of each server -> arguments and (name, mode) of the runs on it."""
    dummy: dict[str, Any] = {"load_format": "dummy", "context_length": 4096}
    full: dict[str, Any] = {"pruning": "none", "adaptive": False}
    # Nothing passes this threshold: the one draft that is always verified makes two groups.
    pruned: dict[str, Any] = {"pruning": "cumulative_product", "prune_threshold": 0.999999, "adaptive": False}
    servers: dict[str, Any] = {
        "plain graphs": (plain_args(target, graphs=True, **dummy), [("plain graphs", None)]),
        "plain eager": (plain_args(target, graphs=False, **dummy), [("plain eager", None)]),
        "flexdraft full": (
            drafting_args(target, "FLEXDRAFT", flexdraft, full, **dummy),
            [("parallel full", "parallel"), ("sequential full", "sequential")],
        ),
        "flexdraft pruned": (
            drafting_args(target, "FLEXDRAFT", flexdraft, pruned, **dummy),
            [("parallel pruned", "parallel"), ("sequential pruned", "sequential")],
        ),
    }
    for method, drafter in tapped.items():
        servers[method] = (drafting_args(target, "DFLARE", drafter, full, **dummy), [(method, "sequential")])
    return servers


def _measure(rows: Rows, servers: dict[str, Any]) -> dict[tuple[str, int], float]:
    import torch

    picked = random.Random(0)
    found: dict[tuple[str, int], float] = {}
    for server, (args, runs) in servers.items():
        with Engine(args) as engine:
            free, total = torch.cuda.mem_get_info()
            rows.add(server=server, start_seconds=engine.start_seconds, memory_gb=round((total - free) / 1e9, 2))
            for (name, mode), batch in ((run, batch) for run in runs for batch in BATCHES):
                prompts = [[picked.randrange(3, 1000) for _ in range(CONTEXT)] for _ in range(batch)]
                engine.generate(prompts, SHORT, mode)  # compiles, and fills the prefix cache
                seconds, steps = zip(*(_timed(engine, prompts, tokens, mode) for tokens in (SHORT, LONG)))
                found[name, batch] = (seconds[1] - seconds[0]) / max(steps[1] - steps[0], 1) * 1000
                floor = FLOORS_MS.get(name) if batch == 1 else None
                rows.add(run=name, batch=batch, step_ms=round(found[name, batch], 3), floor_ms=floor)
    return found


def _timed(engine: Engine, prompts: list[list[int]], tokens: int, mode: str | None) -> tuple[float, int]:
    """Seconds of one batch, and the most steps any of its requests took."""
    started = time.perf_counter()
    answers = engine.generate(prompts, tokens, mode)
    seconds = time.perf_counter() - started
    return seconds, max(answer["meta_info"].get("spec_verify_ct") or tokens for answer in answers)


def _speedups(rows: Rows, step_ms: dict[tuple[str, int], float]) -> None:
    """Tokens per second beside plain decoding with graphs, for every accept length."""
    for (name, batch), milliseconds in step_ms.items():
        plain = step_ms.get(("plain graphs", batch))
        if plain is None or name.startswith("plain"):
            continue
        table = {str(length): speedup(plain, milliseconds, length) for length in ACCEPT_LENGTHS}
        rows.add(speedup_of=name, batch=batch, by_accept_length=table)


def speedup(plain_ms: float, step_ms: float, accept_length: float) -> float:
    """Return how many times faster a step of ``accept_length`` tokens is than as many plain steps."""
    return round(accept_length * plain_ms / step_ms, 3)
