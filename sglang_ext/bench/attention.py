"""``sglang-ext bench-attention``: the CPU attention backend against the host's own, layer by layer.

Both run the same passes over the same paged pool, in turn, so that what disturbs one disturbs the other; the ratio is
a geometric mean over rounds with its confidence interval. The host's backend cannot verify a block of drafts; it is
timed on the extend that comes closest, the same rows appended to the same prefix.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from sglang_ext.bench import environment
from sglang_ext.bench.stats import ratio_interval

BATCHES = (1, 4, 16)
CONTEXTS = (256, 2048)
VERIFY_ROWS = 8
LAYER_CALLS = 30
"""Layers of SmolLM2-135M: metadata is built once per so many layers."""

SLOW_CALLS = 2
"""Layers timed of the host's extend, which recomputes the prefix (and builds no metadata to spread)."""

POOL_COPIES = 6
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Cell:
    """One comparison.

    Attributes:
        kind: ``"decode"`` (one row per request) or ``"verify"`` (:data:`VERIFY_ROWS` rows).
        batch: requests.
        context: keys per request.
        stock_ms, ours_ms: milliseconds per layer, median over rounds.
        ratio: how many times faster ours is; low and high bound it at level 0.95.
        difference: largest difference between the two outputs.
    """

    kind: str
    batch: int
    context: int
    stock_ms: float
    ours_ms: float
    ratio: float
    low: float | None
    high: float | None
    difference: float


def add_parser(subparsers: Any) -> None:
    """Attach ``bench-attention``."""
    parser = subparsers.add_parser(
        "bench-attention",
        help="time the CPU attention backend against SGLang's torch_native",
        description="Time decode and 8-row verification of this package's CPU attention backend against SGLang's "
        "torch_native, with the heads of SmolLM2-135M in bf16, at batch 1, 4 and 16 and context 256 and 2048.",
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=9, help="paired measurements per cell (default: 9)")
    parser.add_argument("--batches", metavar="N,N,...", type=_numbers, default=BATCHES, help="default: 1,4,16")
    parser.add_argument("--contexts", metavar="N,N,...", type=_numbers, default=CONTEXTS, help="default: 256,2048")
    parser.add_argument(
        "--clock",
        choices=sorted(CLOCKS),
        default="wall",
        help="wall: elapsed time; cpu: processor time of this process, less disturbed by others (default: wall)",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="also write the results as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure every cell and print the table."""
    busy = environment.warn_if_busy()
    print(f"{'pass':<8}{'batch':>6}{'context':>9}{'torch_native':>15}{'sglang_ext':>13}   times faster")
    cells = []
    for cell in measure(args.batches, args.contexts, args.rounds, CLOCKS[args.clock]):
        cells.append(cell)
        interval = "" if cell.low is None else f" [{cell.low:.2f}, {cell.high:.2f}]"
        print(
            f"{cell.kind:<8}{cell.batch:>6}{cell.context:>9}{cell.stock_ms:>12.3f} ms{cell.ours_ms:>10.3f} ms"
            f"   {cell.ratio:.2f}{interval}",
            flush=True,
        )
    context = environment.describe()
    print(environment.summary(context))
    if args.out is not None:
        settings = {"clock": args.clock, "rounds": args.rounds, "layers": LAYER_CALLS, "busy_share_before": busy}
        report = {"environment": context, "settings": settings, "cells": [asdict(cell) for cell in cells]}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"results: {args.out}")
    return 0


def measure(
    batches: tuple[int, ...], contexts: tuple[int, ...], rounds: int, clock: Callable[[], float]
) -> Iterator[Cell]:
    """Yield one :class:`Cell` after another, decode before verification."""
    for kind, rows in (("decode", 1), ("verify", VERIFY_ROWS)):
        for context in contexts:
            for batch in batches:
                yield _cell(kind, rows, batch, context, rounds, clock)


def _cell(kind: str, rows: int, batch: int, context: int, rounds: int, clock: Callable[[], float]) -> Cell:
    import torch

    from sglang_ext.serving.attention.harness import SMOLLM2_135M, Harness, backends

    harness = Harness(SMOLLM2_135M, [context] * batch, seed=batch, layers=POOL_COPIES)
    query_lens = [rows] * batch
    query = harness.queries(query_lens)
    verify = SimpleNamespace(verify_lens_cpu=query_lens, draft_token_num=rows, custom_mask=None)
    modes = {"torch_native": "extend", "sglang_ext": "verify"} if rows > 1 else dict.fromkeys(backends(), "decode")
    calls = {"torch_native": SLOW_CALLS if rows > 1 else LAYER_CALLS, "sglang_ext": LAYER_CALLS}
    passes: dict[str, Callable[[], Any]] = {}
    for name, backend in backends().items():
        arguments = (backend(harness.runner), harness.batch(modes[name], query_lens, verify), query, query_lens)
        passes[name] = lambda arguments=arguments, layers=calls[name]: harness.run_pass(*arguments, layers)
    milliseconds: dict[str, list[float]] = {name: [] for name in passes}
    with torch.no_grad():
        outputs = {name: run_once().float() for name, run_once in passes.items()}
        for number in range(rounds):
            for name in sorted(passes, reverse=bool(number % 2)):
                start = clock()
                passes[name]()
                milliseconds[name].append((clock() - start) / calls[name] * 1e3)
    stock, ours = milliseconds["torch_native"], milliseconds["sglang_ext"]
    interval = ratio_interval(stock, ours)
    return Cell(
        kind,
        batch,
        context,
        median(stock),
        median(ours),
        interval.estimate,
        interval.low,
        interval.high,
        float((outputs["torch_native"] - outputs["sglang_ext"]).abs().max()),
    )


def _numbers(text: str) -> tuple[int, ...]:
    values = tuple(int(part) if part.strip().isdigit() else 0 for part in text.split(","))
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: positive whole numbers separated by commas are allowed")
    return values
