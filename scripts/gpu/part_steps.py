"""Step times and memory of a random Qwen3-8B, and the speedup they allow as a function of the accept length.

With random weights drafts are never right: every step commits one token, and its time is all that is measured.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import DRAFTING_VARIANTS, PLAIN_VARIANTS, Variant, check_args, drafting_args, plain_args
from models import QWEN3_8B, TINY, write_flexdraft, write_tapped, write_target
from servers import Ask, Job, Outcome, ask_one
from setting import Rows, Setting

BATCHES = (1, 2, 4, 8, 16)
CONTEXT = 1024
SHORT, LONG = 8, 72
"""Tokens of two runs whose difference leaves the prefill out."""
REPEATS = 2
"""Of both runs; the shorter time counts."""
LIMIT = 90
"""Seconds for one server."""

ACCEPT_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
"""Tokens per step."""
PUBLISHED = {
    "parallel": {"FlexDraft, GSM8K": 7.98, "FlexDraft, GSM8K, independent runs": 7.2},
    "sequential": {"FlexDraft, GSM8K": 7.98, "FlexDraft, GSM8K, independent runs": 7.2},
    "dflare": {"DFlare, mean of six": 7.33, "DFlare, GSM8K": 6.02, "DFlare, MT-Bench": 3.23},
    "dflash": {"DFlash, mean of six": 6.39, "DFlash, GSM8K": 5.28, "DFlash, MT-Bench": 2.85},
}
"""Run -> accept lengths of the methods' drafters for Qwen3-8B, greedy, as their papers and releases give them.

The papers name one accept length for both of FlexDraft's modes; pruning costs some of it.
"""

FLOORS_MS = {"plain": 3.15, "parallel pruned": 3.45, "sequential": 4.25, "dflare": 4.00}
"""Reading every weight once at the bandwidth of an H200, batch 1: no step can be faster."""

FULL: dict[str, Any] = {"pruning": "none"}
#: Nothing passes this threshold: the one draft that is always verified makes two groups.
PRUNED: dict[str, Any] = {"pruning": "cumulative_product", "prune_threshold": 0.999999}
FLEXDRAFT_RUNS = {
    "parallel full": FULL | {"mode": "parallel"},
    "parallel pruned": PRUNED | {"mode": "parallel"},
    "sequential full": FULL | {"mode": "sequential"},
    "sequential pruned": PRUNED | {"mode": "sequential"},
}


@dataclass(frozen=True)
class Timing:
    """What one ask measures: ``kind`` is ``warm``, ``short`` or ``long``."""

    run: str
    batch: int
    kind: str


@dataclass(frozen=True)
class Server:
    """A server, and for each of the job's asks what it measures."""

    job: Job
    timings: list[Timing]


def run(setting: Setting, rows: Rows) -> None:
    """Measure plain decoding and every way of drafting."""
    with tempfile.TemporaryDirectory() as folder:
        servers = plan(Path(folder), setting)
        if setting.dry:
            for name, server in servers.items():
                check_args(server.job.args)
                rows.add(server=name, dry="arguments and plan", ok=True)
            steps = {("plain graphs", 1): 2.0, ("parallel full eager", 1): 4.0}
        else:
            steps = {}
            for name, server in servers.items():
                steps |= measured(rows, name, server, ask_one(name, server.job, setting.work, LIMIT))
        speedups(rows, steps)


def plan(base: Path, setting: Setting) -> dict[str, Server]:
    """Write target and drafters; return the servers, those that matter most first."""
    shape = TINY if setting.dry else QWEN3_8B
    target = write_target(base / "target", shape, weights=False)
    layers, block = (2, 8) if setting.dry else (10, 16)
    depth, taps = (2, 1) if setting.dry else (5, 5)
    flexdraft = write_flexdraft(base / "flexdraft", shape, layers=layers, block=block, rank=512, device=setting.device)
    tapped = {
        method: write_tapped(
            base / method, shape, method=method, layers=depth, taps=taps, block=block, device=setting.device
        )
        for method in ("dflare", "dflash")
    }
    dummy: dict[str, Any] = {"load_format": "dummy", "context_length": 4096}

    def plain(variant: Variant) -> Server:
        return server(plain_args(target, variant, **dummy), {f"plain {variant.name}": None})

    def drafting(variant: Variant, algorithm: str, drafter: Path, runs: dict[str, dict[str, Any]]) -> Server:
        # Parallel passes are captured for as many requests as the server itself would draft for in parallel.
        options: dict[str, Any] = {"adaptive": False, "parallel_max_batch": max(BATCHES)}
        args = drafting_args(target, variant, algorithm, drafter, options, **dummy)
        return server(args, {f"{run} {variant.name}": options for run, options in runs.items()})

    servers = {f"plain {PLAIN_VARIANTS[0].name}": plain(PLAIN_VARIANTS[0])}
    for variant in DRAFTING_VARIANTS:
        servers[f"flexdraft {variant.name}"] = drafting(variant, "FLEXDRAFT", flexdraft, FLEXDRAFT_RUNS)
        for method, drafter in tapped.items():
            runs = {method: FULL | {"mode": "sequential"}}
            servers[f"{method} {variant.name}"] = drafting(variant, "DFLARE", drafter, runs)
    return servers | {f"plain {variant.name}": plain(variant) for variant in PLAIN_VARIANTS[1:]}


def server(args: dict[str, Any], runs: dict[str, dict[str, Any] | None]) -> Server:
    """Plan what to ask of one server: every run in every batch, after warming up."""
    asks, timings = [], []
    for (name, options), batch in ((run, batch) for run in runs.items() for batch in BATCHES):
        picked = random.Random(batch)
        prompts = [[picked.randrange(3, 1000) for _ in range(CONTEXT)] for _ in range(batch)]
        for kind, tokens in kinds():
            asks.append(Ask(f"{name} x{batch} {kind}", prompts, tokens, options))
            timings.append(Timing(name, batch, kind))
    return Server(Job(args, asks), timings)


def kinds() -> Iterator[tuple[str, int]]:
    """Yield the asks of one measurement: the first compiles, and fills the prefix cache."""
    yield "warm", SHORT
    for _ in range(REPEATS):
        yield "short", SHORT
        yield "long", LONG


def measured(rows: Rows, name: str, server: Server, outcome: Outcome) -> dict[tuple[str, int], float]:
    """Turn a server's answers into rows; return milliseconds of a step by run and batch."""
    rows.add(server=name, **outcome.start, error=outcome.error, ok=outcome.error is None)
    seconds: dict[Timing, list[float]] = {}
    steps: dict[Timing, int] = {}
    for timing, answer in zip(server.timings, outcome.answers, strict=False):  # a server cut short answers fewer
        seconds.setdefault(timing, []).append(answer["seconds"])
        counts = [one["meta_info"].get("spec_verify_ct") or len(one["output_ids"]) for one in answer["answers"]]
        steps[timing] = max(counts)
    found = {}
    for run_name, batch in dict.fromkeys((timing.run, timing.batch) for timing in seconds):
        short, long = (Timing(run_name, batch, kind) for kind in ("short", "long"))
        if len(seconds.get(long, [])) < REPEATS:
            continue
        taken = min(seconds[long]) - min(seconds[short])
        found[run_name, batch] = taken / max(steps[long] - steps[short], 1) * 1000
        rows.add(run=run_name, batch=batch, step_ms=round(found[run_name, batch], 3),
                 steps=steps[long] - steps[short], floor_ms=floor_ms(run_name) if batch == 1 else None)  # fmt: skip
    return found


def floor_ms(name: str) -> float | None:
    """Return the floor of a run's step time at batch 1, if there is one."""
    return next((floor for start, floor in FLOORS_MS.items() if name.startswith(start)), None)


def published(name: str) -> dict[str, float]:
    """Return the published accept lengths of a run's method: label -> tokens per step."""
    return next((lengths for start, lengths in PUBLISHED.items() if name.startswith(start)), {})


def speedups(rows: Rows, step_ms: dict[tuple[str, int], float]) -> None:
    """Tokens per second beside plain decoding with graphs, for every accept length and the published ones."""
    for (name, batch), milliseconds in step_ms.items():
        plain = step_ms.get(("plain graphs", batch))
        if plain is None or name.startswith("plain"):
            continue
        table = {str(length): speedup(plain, milliseconds, length) for length in ACCEPT_LENGTHS}
        marked = {
            label: {"accept_length": length, "speedup": speedup(plain, milliseconds, length)}
            for label, length in published(name).items()
        }
        rows.add(speedup_of=name, batch=batch, by_accept_length=table, published=marked,
                 breaks_even_at=round(milliseconds / plain, 3))  # fmt: skip


def speedup(plain_ms: float, step_ms: float, accept_length: float) -> float:
    """Return how many times faster a step of ``accept_length`` tokens is than as many plain steps."""
    return round(accept_length * plain_ms / step_ms, 3)
