"""A tiny random Qwen3 served with and without drafting: greedy texts must be equal."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from engines import DRAFTING_VARIANTS, PLAIN_VARIANTS, check_args, drafting_args, plain_args
from models import TINY, write_flexdraft, write_tapped, write_target
from servers import Ask, Job, Outcome, ask_all
from setting import Rows, Setting

TOKENS = 64
AT_ONCE = 4
"""Servers side by side: nothing is timed here, and starting one takes longer than what is asked of it."""
LIMIT = 80
"""Seconds for one server."""
NEAR_TIE = 2e-2
"""Two tokens whose log-probabilities are closer may swap when sums are taken in another order (bf16)."""


def run(setting: Setting, rows: Rows) -> None:
    """Compare every mode of every drafter, in every variant, with plain decoding."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = plan(Path(folder))
        if setting.dry:
            for name, job in jobs.items():
                check_args(job.args)
                rows.add(server=name, dry="arguments and plan", ok=True)
            return
        compare(rows, ask_all(jobs, setting.work, at_once=AT_ONCE, limit=LIMIT))


def plan(base: Path) -> dict[str, Job]:
    """Write target and drafters; return the servers to start and what to ask of each."""
    target = write_target(base / "target", TINY, weights=True)
    flexdraft = write_flexdraft(base / "flexdraft", TINY, layers=2, block=8, rank=16)
    dflare = write_tapped(base / "dflare", TINY, method="dflare", layers=2, taps=1, block=8)
    none: dict[str, Any] = {"pruning": "none", "adaptive": False}
    masked = none | {"gpu_attention": "masked"}
    eight: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}
    both, sequential = ("parallel", "sequential"), ("sequential",)
    drafting: dict[str, tuple[Any, ...]] = {
        "flexdraft merged": ("FLEXDRAFT", flexdraft, none, {}, both),
        "flexdraft masked": ("FLEXDRAFT", flexdraft, masked, {}, ("parallel",)),
        "flexdraft fp8": ("FLEXDRAFT", flexdraft, none, eight, ("parallel",)),
        "dflare merged": ("DFLARE", dflare, none, {}, sequential),
        "dflare masked": ("DFLARE", dflare, masked, {}, sequential),
    }
    prompts = _prompts()
    jobs = {}
    for variant in PLAIN_VARIANTS:
        jobs[f"plain {variant.name}"] = Job(plain_args(target, variant), [_plain_ask(prompts)])
    jobs["plain fp8"] = Job(plain_args(target, PLAIN_VARIANTS[-1], **eight), [_plain_ask(prompts)])
    for variant in DRAFTING_VARIANTS:
        for name, (algorithm, drafter, options, more, modes) in drafting.items():
            args = drafting_args(target, variant, algorithm, drafter, options, **more)
            jobs[f"{name} {variant.name}"] = Job(args, [Ask(mode, prompts, TOKENS, {"mode": mode}) for mode in modes])
    return jobs


def _prompts() -> list[list[int]]:
    picked = random.Random(0)
    return [[picked.randrange(3, TINY["vocab_size"]) for _ in range(length)] for length in (1, 7, 33, 130, 511)]


def _plain_ask(prompts: list[list[int]]) -> Ask:
    return Ask("plain", prompts, TOKENS, logprobs=True)


def compare(rows: Rows, found: dict[str, Outcome]) -> None:
    """Hold every answer against plain decoding without graphs; plain decoding with graphs as well."""
    for name, outcome in found.items():
        rows.add(server=name, **outcome.start, error=outcome.error, ok=outcome.error is None)
    expected = {kind: found[f"plain {kind}"].answers for kind in ("eager", "fp8")}
    for name, outcome in found.items():
        kind = "fp8" if "fp8" in name else "eager"
        if name == f"plain {kind}":
            continue
        for answer in outcome.answers:
            if not expected[kind]:
                rows.add(
                    server=name, mode=answer["name"], ok=False, error="plain decoding gave nothing to compare with"
                )
                continue
            gaps = [_gap(a, b) for a, b in zip(expected[kind][0]["answers"], answer["answers"], strict=True)]
            lengths = [one["meta_info"].get("spec_accept_length") for one in answer["answers"]]
            rows.add(server=name, mode=answer["name"], equal=sum(gap == 0 for gap in gaps), of=len(gaps),
                     worst_gap=max(gaps), accept_lengths=lengths, ok=max(gaps) <= NEAR_TIE)  # fmt: skip


def _gap(plain: dict[str, Any], found: dict[str, Any]) -> float:
    """0 if the texts are equal, else how far apart plain found the two tokens at the first difference (inf: more than
    one place)."""
    for at, (ours, theirs) in enumerate(zip(found["output_ids"], plain["output_ids"], strict=True)):
        if ours != theirs:
            top = plain["meta_info"]["output_top_logprobs"][at]
            by_token = {token: logprob for logprob, token, *_ in top}
            return by_token[theirs] - by_token[ours] if {ours, theirs} <= by_token.keys() else float("inf")
    return 0.0
