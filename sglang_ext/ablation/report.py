"""Tables and a picture of what the arms of each study measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.ablation.runner import Measured
from sglang_ext.bench.stats import Interval, ratio_interval, t_quantile
from sglang_ext.training.evaluate import Acceptance

COLUMNS = "| arm | parameters | accept length | against the first | drafts verified a step | by position |"


@dataclass(frozen=True)
class Line:
    """One row of a study's table; ``against`` is None for the study's first arm."""

    label: str
    parameters: int
    accept_length: Interval
    against: Interval | None
    verified: float
    by_position: tuple[float, ...]


def mean_interval(found: Sequence[Acceptance]) -> Interval:
    """Tokens per step over all responses, with the Student interval of a ratio of sums over responses."""
    steps = sum(one.steps for one in found)
    estimate = sum(one.tokens for one in found) / max(1, steps)
    count = len(found)
    if count < 2:
        return Interval(estimate, None, None, count)
    squares = math.fsum((one.tokens - estimate * one.steps) ** 2 for one in found)
    half = t_quantile(count - 1) * math.sqrt(count / (count - 1) * squares) / steps
    return Interval(estimate, estimate - half, estimate + half, count)


def lines_of(study: Sequence[Measured]) -> list[Line]:
    """Rows of one study; differences are ratios of accept lengths on the same responses."""
    lines = []
    first = study[0].found
    for measured in study:
        found = list(measured.found.values())
        total = Acceptance(found[0].block_size)
        for one in found:
            total.merge(one)
        against = None
        if measured is not study[0]:
            ours = [one.accept_length for one in measured.found.values()]
            against = ratio_interval(ours, [first[key].accept_length for key in measured.found])
        verified = total.verified / max(1, total.steps)
        lines.append(
            Line(measured.arm.label, measured.parameters, mean_interval(found), against, verified, total.by_position)
        )
    return lines


def render(studies: Mapping[str, Sequence[Measured]], left: Mapping[str, Sequence[str]], title: str) -> str:
    """Return the report as Markdown; ``left`` names the arms of each study that the time did not reach."""
    parts = [
        f"# {title}",
        "",
        "Accept length: tokens committed per target step, greedy decoding being replayed on held-out target responses.",
        "Intervals are at level 0.95 over responses; ratios are geometric means over the same responses.",
        "They say how sure the measurement is, not how much another training seed would change it.",
    ]
    for name, study in studies.items():
        parts += ["", f"## {name}", ""]
        if study:
            parts += [COLUMNS, "|---|---|---|---|---|---|", *map(_row, lines_of(study))]
            parts += ["", f"{study[0].steps} steps each; {len(study[0].found)} responses."]
        if left.get(name):
            parts += ["", f"Not finished in the time given: {', '.join(left[name])}."]
    return "\n".join(parts) + "\n"


def _row(line: Line) -> str:
    against = "-" if line.against is None else str(line.against)
    slots = " ".join(f"{rate:.2f}" for rate in line.by_position)
    return f"| {line.label} | {line.parameters:,} | {line.accept_length} | {against} | {line.verified:.2f} | {slots} |"


def draw(path: Path, studies: Mapping[str, Sequence[Measured]]) -> None:
    """Write a PNG with one panel per study: accept length of each arm with its interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = {name: lines_of(study) for name, study in studies.items() if study}
    heights = [1.0 + 0.45 * len(lines) for lines in shown.values()]
    figure, axes = pyplot.subplots(
        len(shown), 1, figsize=(7, sum(heights)), squeeze=False, layout="constrained", height_ratios=heights
    )
    for axis, (name, lines) in zip(axes[:, 0], shown.items(), strict=True):
        for place, line in enumerate(lines):
            value = line.accept_length
            low, high = (value.estimate if end is None else end for end in (value.low, value.high))
            error = [[value.estimate - low], [high - value.estimate]]
            axis.errorbar([value.estimate], [place], xerr=error, fmt="o", capsize=3, color="#2563eb")
        axis.set_yticks(range(len(lines)), [line.label for line in lines])
        axis.invert_yaxis()
        axis.set_title(name, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.3)
    axes[-1, 0].set_xlabel("accept length")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
