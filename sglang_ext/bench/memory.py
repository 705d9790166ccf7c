"""``sglang-ext bench memory``: what speculation adds to a server's memory.

A plain and a speculative server with the same KV pool answer the same prompts, one after the other. Compared is the
process that holds the model: its resident memory after the requests, and its peak.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from sglang_ext.bench import datasets, environment
from sglang_ext.bench.client import Sampling
from sglang_ext.bench.methods import parse_method
from sglang_ext.bench.server import ServerProcess
from sglang_ext.core.refusal import Refusal

POOL_FLAG = "--max-total-tokens"
POOL_TOKENS = 16384
PROMPTS = 8
MAX_NEW_TOKENS = 96
ALLOWANCE = 0.10
MIB = 2**20


@dataclass(frozen=True)
class Footprint:
    """Memory of one server's model process, in bytes.

    Attributes:
        resident: resident set after the requests.
        private: the part of it shared with no other process and no file.
        peak: largest resident set so far.
        pool_tokens: capacity of the KV pool.
        drafter: bytes of drafter weights; 0 on the plain server.
        drafter_pool: bytes of the drafter's own keys and values, all slots of the pool.
    """

    name: str
    resident: int
    private: int
    peak: int
    pool_tokens: int
    drafter: int
    drafter_pool: int


def run(args: argparse.Namespace, flags: Sequence[str], out: Path) -> int:
    """Measure both servers, print the comparison, and return 1 if speculation needs more than it may."""
    if POOL_FLAG not in flags:
        flags = [*flags, POOL_FLAG, str(POOL_TOKENS)]
    groups = datasets.load(args.data, args.datasets, args.prompts or PROMPTS)
    prompts = [prompt for group in groups.values() for prompt in group][: args.prompts or PROMPTS]
    method = parse_method(args.method, args.drafter)
    plain = footprint("plain", flags, prompts, args.max_new_tokens or MAX_NEW_TOKENS, out)
    fast = footprint(
        method.name, [*flags, *method.arguments(args.options)], prompts, args.max_new_tokens or MAX_NEW_TOKENS, out
    )
    if plain.pool_tokens != fast.pool_tokens:
        raise Refusal(
            f"the KV pools hold {plain.pool_tokens} and {fast.pool_tokens} tokens",
            "only servers with equal pools can be compared",
            f"lower {POOL_FLAG} in --server-args",
        )
    context = environment.describe()
    lines = table(plain, fast)
    data = {"environment": context, "footprints": [asdict(plain), asdict(fast)]}
    (out / "memory.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    text = ["# Memory of the process that holds the model", "", environment.summary(context), "", *lines]
    (out / "memory.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(lines))
    print(f"\nresults: {out}")
    return 0 if fast.resident <= allowed(plain, fast) else 1


def footprint(name: str, flags: Sequence[str], prompts: Sequence[datasets.Prompt], cap: int, out: Path) -> Footprint:
    """Start one server, answer the prompts together and one by one, and read its memory."""
    with ServerProcess(name, flags, out / f"server-memory-{name}.log") as server:
        target = str(server.client.get_json("/model_info")["model_path"])
        encoded = datasets.encode({"prompts": list(prompts)}, target)["prompts"]
        server.client.generate_together([prompt.input_ids for prompt in encoded], Sampling(cap))
        for prompt in encoded[:2]:
            server.client.generate(prompt.input_ids, Sampling(cap))
        state = server.client.get_json("/server_info")["internal_states"][0]
        return _read(name, server.scheduler(), state)


def allowed(plain: Footprint, fast: Footprint) -> float:
    """Return the memory a speculative server may have: plain + drafter weights and pool + 10 % of plain."""
    return plain.resident * (1 + ALLOWANCE) + fast.drafter + fast.drafter_pool


def table(plain: Footprint, fast: Footprint) -> list[str]:
    """Return the Markdown table and the verdict."""
    from sglang_ext.bench.report import render_table

    rows = [
        [what, *(f"{getattr(item, field) / MIB:.1f}" for item in (plain, fast))]
        for what, field in (
            ("resident", "resident"),
            ("private", "private"),
            ("peak", "peak"),
            ("drafter weights", "drafter"),
            ("drafter KV pool", "drafter_pool"),
        )
    ]
    rows.append(["KV pool, tokens", str(plain.pool_tokens), str(fast.pool_tokens)])
    limit = allowed(plain, fast)
    verdict = "within" if fast.resident <= limit else "ABOVE"
    sentence = (
        f"{fast.name} holds {fast.resident / MIB:.1f} MiB, {verdict} the {limit / MIB:.1f} MiB of plain + drafter "
        f"+ {ALLOWANCE:.0%}."
    )
    return [*render_table(["MiB", plain.name, fast.name], rows), "", sentence]


def _read(name: str, process: psutil.Process, state: dict[str, Any]) -> Footprint:
    full = process.memory_full_info()
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    peak_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    capacity = int(state["memory_usage"]["token_capacity"])
    return Footprint(
        name=name,
        resident=int(full.rss),
        private=int(full.uss),
        peak=1024 * peak_kib,
        pool_tokens=capacity,
        drafter=int(state.get("speculative_drafter_bytes", 0)),
        drafter_pool=capacity * int(state.get("speculative_drafter_kv_bytes_per_token", 0)),
    )
