"""``sglang-ext bench steps``: where the time of one decoding step goes at batch 1, with a plain step beside it.

The FlexDraft server runs with the option ``profile``: it times the parts of every step and shows the sums in
``/server_info``. What the client sees beyond them is the host's share: scheduling, tokens to text, HTTP.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_ext.bench import datasets, environment
from sglang_ext.bench.client import Client, Completion, Sampling
from sglang_ext.bench.console import finished, status
from sglang_ext.bench.interleave import arm_order
from sglang_ext.bench.methods import ServedMethod, parse_method
from sglang_ext.bench.runner import OVERRIDE, PLAIN, Arm, Switch
from sglang_ext.bench.server import ServerProcess
from sglang_ext.core.config import load_options

PROMPTS = 8
MAX_NEW_TOKENS = 128
MODES = {"parallel": "parallel", "sequential": "sequential", OVERRIDE: "plain"}
"""Column name -> mode asked for in the request; a method that lacks a mode has no such column."""

PARTS = {
    "target pass": ("target",),
    "target head": ("target head",),
    "draft pass": ("draft",),
    "draft head": ("draft head",),
    "drafter's context": ("context",),
    "sampling and acceptance": ("sampling",),
    "plugin bookkeeping": ("plan", "prepare", "other"),
}
"""Row of the table -> sections of the worker's profile it adds up."""


@dataclass(frozen=True)
class StepTimes:
    """Mean times of one mode at batch 1, in milliseconds per step.

    Attributes:
        steps: decoding steps measured.
        tokens_per_step: tokens committed per step.
        parts_ms: the worker's parts; empty for the plain server, which has no worker of ours.
        step_ms: the whole step as the client sees it.
    """

    mode: str
    steps: int
    tokens_per_step: float
    parts_ms: dict[str, float]
    step_ms: float

    @property
    def worker_ms(self) -> float:
        """Everything inside the worker."""
        return sum(self.parts_ms.values())

    @property
    def host_ms(self) -> float:
        """The rest: the host's scheduler, detokenizer and HTTP server."""
        return self.step_ms - self.worker_ms


def run(args: argparse.Namespace, flags: Sequence[str], out: Path) -> int:
    """Measure, print the table and write ``steps.json`` and ``steps.md``."""
    method, prompts = parse_method(args.method, args.drafter), _prompts(args)
    options = json.dumps({**asdict(load_options(args.options)), "profile": True})
    with ExitStack() as stack:
        fast = stack.enter_context(
            ServerProcess(method.name, [*flags, *method.arguments(options)], out / "server-steps.log")
        )
        fast.pause()
        plain = stack.enter_context(ServerProcess("plain", flags, out / "server-steps-plain.log"))
        encoded = datasets.encode({"prompts": prompts}, str(plain.client.get_json("/model_info")["model_path"]))[
            "prompts"
        ]
        context = environment.describe()
        arms = _arms(method, fast, plain, args.max_new_tokens or MAX_NEW_TOKENS)
        Switch(arms).none()  # an idle server looks busy
        context["busy_share_before"] = environment.warn_if_busy()
        times = measure(arms, encoded)
    lines = table(times)
    text = "\n".join(["# One decoding step at batch 1", "", environment.summary(context), "", *lines]) + "\n"
    (out / "steps.md").write_text(text, encoding="utf-8")
    data = {"environment": context, "times": [asdict(item) for item in times]}
    (out / "steps.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines))
    print(f"\nresults: {out}")
    return 0


def measure(arms: Sequence[Arm], prompts: Sequence[datasets.Prompt]) -> list[StepTimes]:
    """Answer every prompt under every arm, one request at a time, and return each arm's step times."""
    switch = Switch(arms)
    by_name = {arm.name: arm for arm in arms}
    answers: dict[str, list[Completion]] = {arm.name: [] for arm in arms}
    profiles: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for index, prompt in enumerate(prompts):
        for name in arm_order(list(by_name), index):
            arm = by_name[name]
            switch.only(arm)
            arm.client.generate(prompt.input_ids, Sampling(8, custom_params=arm.sampling.custom_params))
            before = read_profile(arm.client, MODES.get(name))
            answers[name].append(arm.client.generate(prompt.input_ids, arm.sampling))
            profiles[name].append(difference(read_profile(arm.client, MODES.get(name)), before))
        status(f"prompt {index + 1}/{len(prompts)}")
    finished(f"{len(prompts)} prompts measured")
    switch.all()
    return [step_times(arm.name, answers[arm.name], profiles[arm.name]) for arm in arms]


def read_profile(client: Client, mode: str | None) -> dict[str, Any]:
    """Return ``{"steps": n, section: total ms}`` of one mode at batch 1; zeros where nothing ran, or for ``None``."""
    if mode is None:
        return {"steps": 0}
    state = client.get_json("/server_info")["internal_states"][0]
    for entry in state["speculative_profile"]:
        if entry["mode"] == mode and entry["batch"] == 1:
            return {"steps": entry["steps"], **entry["ms"]}
    return {"steps": 0}


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, Any]:
    """Return what was added between two readings."""
    return {name: value - before.get(name, 0) for name, value in after.items()}


def step_times(name: str, answers: Sequence[Completion], profiles: Sequence[Mapping[str, float]]) -> StepTimes:
    """Average one arm's measurements over its steps."""
    seconds = sum(answer.last_s - answer.first_s for answer in answers)
    tokens = sum(answer.tokens - 1 for answer in answers)
    profiled = int(sum(profile["steps"] for profile in profiles))
    steps = profiled or tokens  # a plain server commits one token a step
    totals: dict[str, float] = {}
    for profile in profiles:
        for section, ms in profile.items():
            totals[section] = totals.get(section, 0.0) + ms
    parts = {}
    if profiled:
        parts = {row: sum(totals.get(section, 0.0) for section in sections) / steps for row, sections in PARTS.items()}
    return StepTimes(name, steps, tokens / steps, parts, 1000.0 * seconds / steps)


def table(times: Sequence[StepTimes]) -> list[str]:
    """Return the Markdown table, and a sentence on the plugin's own share."""
    from sglang_ext.bench.report import render_table

    rows: list[list[str]] = []
    for part in PARTS:
        rows.append([part, *(_ms(item.parts_ms.get(part)) for item in times)])
    rows.append(["scheduler, text, HTTP", *(_ms(item.host_ms if item.parts_ms else None) for item in times)])
    rows.append(["whole step", *(_ms(item.step_ms) for item in times)])
    rows.append(["tokens per step", *(f"{item.tokens_per_step:.2f}" for item in times)])
    rows.append(["per token", *(_ms(item.step_ms / item.tokens_per_step) for item in times)])
    rows.append(["steps measured", *(str(item.steps) for item in times)])
    lines = render_table(["ms per step", *(item.mode for item in times)], rows)
    plain = next(item for item in times if item.mode == PLAIN)
    lines.append("")
    for item in times:
        if item.parts_ms:
            own = item.parts_ms["plugin bookkeeping"]
            lines.append(
                f"Plugin bookkeeping, {item.mode}: {own:.2f} ms a step, {100 * own / plain.step_ms:.1f} % of a plain "
                f"step ({plain.step_ms:.2f} ms)."
            )
    return lines


def _arms(method: ServedMethod, fast: ServerProcess, plain: ServerProcess, cap: int) -> list[Arm]:
    arms = [
        Arm(name, fast.client, Sampling(cap, custom_params={"speculative": {"mode": mode}}), fast)
        for name, mode in MODES.items()
        if mode == "plain" or mode in method.modes
    ]
    return [*arms, Arm(PLAIN, plain.client, Sampling(cap), plain)]


def _prompts(args: argparse.Namespace) -> list[datasets.Prompt]:
    groups = datasets.load(args.data, args.datasets, args.prompts or PROMPTS)
    return [prompt for group in groups.values() for prompt in group][: args.prompts or PROMPTS]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
