"""Turns raw measurements into rows, a Markdown report and a JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_ext.bench import environment as env
from sglang_ext.bench.runner import REFERENCES, Measurement
from sglang_ext.bench.stats import Interval, PositionRate, acceptance_by_position, ratio_interval
from sglang_ext.bench.texts import Score, TextCheck, compare
from sglang_ext.core.records import StepRecord


@dataclass(frozen=True)
class Row:
    """One method on one dataset at one batch size.

    Attributes:
        arm: the method.
        decode_tok_s, total_tok_s: mean speed of the method and of each plain arm, in tokens a second.
        decode_ratio, total_ratio: the method over each plain arm, paired by round.
        accept_length: tokens per target pass of the method, prefill's token included; None if not counted.
        texts: comparison with each plain arm; empty when sampling.
        rounds: rounds measured.
    """

    dataset: str
    batch: int
    arm: str
    rounds: int
    decode_tok_s: dict[str, float]
    total_tok_s: dict[str, float]
    decode_ratio: dict[str, Interval]
    total_ratio: dict[str, Interval]
    accept_length: float | None
    texts: dict[str, TextCheck]


@dataclass(frozen=True)
class Acceptance:
    """What one method's step records of one dataset say (requests one at a time)."""

    dataset: str
    arm: str
    steps: int
    mean_verify_length: float
    mean_accepted: float
    modes: dict[str, int]
    positions: list[PositionRate]


def rows(measurements: Sequence[Measurement], score: Score | None, tie_gap: float) -> list[Row]:
    """Return a row per dataset, batch size and method; texts are compared if ``score`` is given (greedy decoding)."""
    groups: dict[tuple[str, int], dict[str, list[Measurement]]] = {}
    for measurement in measurements:
        block = measurement.block
        groups.setdefault((block.dataset, block.batch), {}).setdefault(block.arm, []).append(measurement)
    return [
        _row(dataset, batch, arm, arms, score, tie_gap)
        for (dataset, batch), arms in groups.items()
        for arm in arms_of(arms, plain=False)
    ]


def arms_of(names: Iterable[str], *, plain: bool) -> list[str]:
    """Return the plain arms or the methods among ``names``, each once; plain servers before plain requests."""
    known = dict.fromkeys(names)
    return [name for name in REFERENCES if name in known] if plain else [n for n in known if n not in REFERENCES]


def acceptance(records: Mapping[tuple[str, str], Sequence[StepRecord]]) -> list[Acceptance]:
    """Summarise step records; prefill records and steps that verified nothing are left out."""
    summaries = []
    for (dataset, arm), every in records.items():
        steps = [record for record in every if record.mode != "prefill"]
        modes: dict[str, int] = {}
        for record in steps:
            modes[record.mode] = modes.get(record.mode, 0) + 1
        count = max(len(steps), 1)
        summaries.append(
            Acceptance(
                dataset,
                arm,
                len(steps),
                sum(record.verify_length for record in steps) / count,
                sum(record.accepted for record in steps) / count,
                modes,
                acceptance_by_position(steps),
            )
        )
    return summaries


def markdown(table: Sequence[Row], accepted: Sequence[Acceptance], environment: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = ["# Speculative against plain decoding", "", env.summary(dict(environment)), ""]
    lines += summary_table(table)
    lines += [
        "",
        "tok/s: tokens a second of the whole batch, its prompts read. Ratio: geometric mean of the rounds' paired "
        "ratios with its 95 % confidence interval. Accept length: tokens per target pass. Texts: greedy outputs equal "
        "to the plain ones, near ties and differences apart.",
        "",
        *end_to_end_table(table),
    ]
    for item in accepted:
        lines += ["", *acceptance_table(item)]
    return "\n".join(lines) + "\n"


def summary_table(table: Sequence[Row]) -> list[str]:
    """Return the main table: decoding speed, ratios, accept length, text equality."""
    arms = list(table[0].decode_ratio)
    head = ["dataset", "batch", "method", *(f"{arm} tok/s" for arm in arms), "tok/s"]
    head += [f"ratio to {arm}" for arm in arms] + ["accept length"] + [f"texts = {arm}" for arm in arms]
    body = []
    for row in table:
        cells = [row.dataset, str(row.batch), row.arm]
        cells += [f"{row.decode_tok_s[arm]:.1f}" for arm in [*arms, row.arm]]
        cells += [str(row.decode_ratio[arm]) for arm in arms]
        cells.append("-" if row.accept_length is None else f"{row.accept_length:.2f}")
        cells += [str(row.texts[arm]) if arm in row.texts else "sampled" for arm in arms]
        body.append(cells)
    return render_table(head, body)


def end_to_end_table(table: Sequence[Row]) -> list[str]:
    """Return the table of speeds with reading the prompt included."""
    arms = list(table[0].decode_ratio)
    head = ["dataset", "batch", "method", *(f"{arm} end-to-end tok/s" for arm in arms), "end-to-end tok/s"]
    head += [f"ratio to {arm}" for arm in arms] + ["rounds"]
    body = [
        [
            row.dataset,
            str(row.batch),
            row.arm,
            *(f"{row.total_tok_s[arm]:.1f}" for arm in [*arms, row.arm]),
            *(str(row.total_ratio[arm]) for arm in arms),
            str(row.rounds),
        ]
        for row in table
    ]
    return render_table(head, body)


def acceptance_table(item: Acceptance) -> list[str]:
    """Return a method's acceptance by draft position on one dataset."""
    modes = ", ".join(f"{count} {mode}" for mode, count in item.modes.items())
    head = ["draft position", "verified", "accepted", "accepted of verified", "accepted if all before were"]
    body = [
        [
            str(rate.position),
            str(rate.verified),
            str(rate.accepted),
            f"{rate.marginal:.3f}" if rate.verified else "-",
            f"{rate.conditional:.3f}" if rate.reached else "-",
        ]
        for rate in item.positions
    ]
    title = (
        f"{item.arm}, {item.dataset}, batch 1: {item.steps} steps ({modes}), {item.mean_verify_length:.2f} drafts "
        f"verified and {item.mean_accepted:.2f} accepted per step"
    )
    return [title, "", *render_table(head, body)]


def write(
    folder: Path,
    markdown_text: str,
    measurements: Sequence[Measurement],
    table: Sequence[Row],
    accepted: Sequence[Acceptance],
    environment: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> None:
    """Write ``results.json`` (every raw measurement) and ``report.md``."""
    data = {
        "environment": environment,
        "settings": settings,
        "rows": [asdict(row) for row in table],
        "acceptance": [asdict(item) for item in accepted],
        "measurements": [measurement.to_dict() for measurement in measurements],
    }
    (folder / "results.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(markdown_text, encoding="utf-8")


def _row(
    dataset: str, batch: int, arm: str, arms: Mapping[str, list[Measurement]], score: Score | None, tie_gap: float
) -> Row:
    plain, fast = arms_of(arms, plain=True), arms[arm]
    shown = [arm, *plain]
    verify = sum(completion.verify_count for measurement in fast for completion in measurement.completions)
    by_key = {name: {measurement.key: measurement for measurement in arms[name]} for name in plain}
    return Row(
        dataset=dataset,
        batch=batch,
        arm=arm,
        rounds=len(fast),
        decode_tok_s={name: _mean([m.decode_tok_s for m in arms[name]]) for name in shown},
        total_tok_s={name: _mean([m.total_tok_s for m in arms[name]]) for name in shown},
        decode_ratio={name: _paired(fast, by_key[name], lambda m: m.decode_tok_s) for name in plain},
        total_ratio={name: _paired(fast, by_key[name], lambda m: m.total_tok_s) for name in plain},
        accept_length=sum(measurement.tokens for measurement in fast) / verify if verify else None,
        texts={} if score is None else {name: compare(fast, by_key[name], score, tie_gap) for name in plain},
    )


def _paired(fast: Sequence[Measurement], slow: Mapping[Any, Measurement], speed: Any) -> Interval:
    pairs = [(speed(measurement), speed(slow[measurement.key])) for measurement in fast]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not known:
        raise ValueError("no round generated more than one token per request; raise --max-new-tokens")
    return ratio_interval([a for a, _ in known], [b for _, b in known])


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def render_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table with aligned columns."""
    widths = [max(len(line[column]) for line in [head, *body]) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(head), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *(line(cells) for cells in body)]
