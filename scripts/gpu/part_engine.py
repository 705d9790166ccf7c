"""A tiny random Qwen3 served with and without drafting: greedy texts must be equal."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from engines import Engine, check_args, drafting_args, plain_args
from models import TINY, write_flexdraft, write_tapped, write_target
from setting import Rows, Setting

TOKENS = 64
NEAR_TIE = 2e-2
"""Two tokens whose log-probabilities are closer may swap when sums are taken in another order (bf16)."""


def run(setting: Setting, rows: Rows) -> None:
    """Compare every mode of every drafter with plain decoding."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        target = write_target(base / "target", TINY, weights=True)
        flexdraft = write_flexdraft(base / "flexdraft", TINY, layers=2, block=8, rank=16)
        dflare = write_tapped(base / "dflare", TINY, method="dflare", layers=2, taps=1, block=8)
        none: dict[str, Any] = {"pruning": "none", "adaptive": False}
        servers = {
            "flexdraft merged": (drafting_args(target, "FLEXDRAFT", flexdraft, none), ("parallel", "sequential")),
            "flexdraft masked": (
                drafting_args(target, "FLEXDRAFT", flexdraft, none | {"gpu_attention": "masked"}), ("parallel",)
            ),
            "flexdraft fp8": (
                drafting_args(target, "FLEXDRAFT", flexdraft, none, kv_cache_dtype="fp8_e4m3"), ("parallel",)
            ),
            "dflare": (drafting_args(target, "DFLARE", dflare, none), ("sequential",)),
            "dflare masked": (
                drafting_args(target, "DFLARE", dflare, none | {"gpu_attention": "masked"}), ("sequential",)
            ),
        }  # fmt: skip
        plain = {
            "": plain_args(target, graphs=False),
            "fp8": plain_args(target, graphs=False, kv_cache_dtype="fp8_e4m3"),
        }
        if setting.dry:
            for name, (args, _) in servers.items():
                check_args(args)
                rows.add(server=name, dry="arguments and plan", ok=True)
            for args in plain.values():
                check_args(args)
            return
        _compare(rows, plain, servers)


def _prompts() -> list[list[int]]:
    picked = random.Random(0)
    return [[picked.randrange(3, TINY["vocab_size"]) for _ in range(length)] for length in (1, 7, 33, 130, 511)]


def _compare(rows: Rows, plain: dict[str, dict[str, Any]], servers: dict[str, Any]) -> None:
    expected = {}
    for name, args in plain.items():
        with Engine(args) as engine:
            expected[name] = engine.generate(_prompts(), TOKENS, logprobs=True)
            rows.add(server=f"plain {name}".strip(), start_seconds=engine.start_seconds)
    for name, (args, modes) in servers.items():
        with Engine(args) as engine:
            for mode in modes:
                found = engine.generate(_prompts(), TOKENS, mode)
                gaps = [_gap(a, b) for a, b in zip(expected["fp8" if "fp8" in name else ""], found)]
                worst = max(gap for gap in gaps)
                lengths = [answer["meta_info"].get("spec_accept_length") for answer in found]
                rows.add(server=name, mode=mode, equal=sum(gap == 0 for gap in gaps), of=len(gaps),
                         worst_gap=worst, accept_lengths=lengths, ok=worst <= NEAR_TIE)  # fmt: skip


def _gap(plain: dict[str, Any], found: dict[str, Any]) -> float:
    """0 if the texts are equal, else how far apart plain found the two tokens at the first difference (inf: more than
    one place)."""
    for at, (ours, theirs) in enumerate(zip(found["output_ids"], plain["output_ids"], strict=True)):
        if ours != theirs:
            top = plain["meta_info"]["output_top_logprobs"][at]
            by_token = {token: logprob for logprob, token, *_ in top}
            return by_token[theirs] - by_token[ours] if {ours, theirs} <= by_token.keys() else float("inf")
    return 0.0
