"""Plots as inline SVG: accept-length histogram, acceptance per slot, modes over the run."""

from __future__ import annotations

from collections.abc import Sequence

from demo import stats
from demo.markup import element, text
from demo.steps import Step

WIDTH, HEIGHT, BASE = 300, 130, 104
LANE_LEFT, LANE_WIDTH = 78, 620


def plots(plain: Sequence[Step], fast: Sequence[Step]) -> str:
    """Return all plots of a run."""
    charts = histogram(stats.accept_histogram(fast)) + slots(stats.slot_acceptance(fast))
    return element("div", charts + timeline(plain, fast), "plots")


def histogram(counts: Sequence[int]) -> str:
    """Return passes by number of accepted drafts."""
    most = max(counts, default=0) or 1
    bars = [(str(value), count / most, str(count)) for value, count in enumerate(counts)]
    return _bars("Drafts accepted per pass", "accepted drafts", bars, "bar-accept")


def slots(acceptance: Sequence[tuple[int, int]]) -> str:
    """Return the share of verified drafts accepted, by slot of the block."""
    bars = [
        (str(slot), accepted / verified, f"{accepted}/{verified}")
        for slot, (accepted, verified) in enumerate(acceptance, 1)
    ]
    return _bars("Acceptance per slot (accepted/verified)", "slot", bars, "bar-slot")


def timeline(plain: Sequence[Step], fast: Sequence[Step]) -> str:
    """Return one lane per side: which mode decoded when."""
    end = max([step.at_s for side in (plain, fast) for step in side[-1:]], default=0.0) or 1.0
    lanes = []
    for row, (name, steps) in enumerate((("plain", plain), ("speculative", fast))):
        y = 8 + row * 30
        lanes.append(f'<text class="label" x="0" y="{y + 15}">{name}</text>')
        for mode, start, stop in stats.mode_spans(steps):
            x, width = LANE_LEFT + start / end * LANE_WIDTH, max(0.5, (stop - start) / end * LANE_WIDTH)
            lanes.append(
                f'<rect class="lane mode-{text(mode)}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="22">'
                f"<title>{text(mode)}: {start:.2f} to {stop:.2f} s</title></rect>"
            )
    axis = "".join(
        f'<text class="label" text-anchor="middle" x="{LANE_LEFT + share * LANE_WIDTH:.0f}" y="84">'
        f"{share * end:.1f} s</text>"
        for share in (0, 0.5, 1)
    )
    body = f'<svg viewBox="0 0 720 90" role="img" aria-label="Modes over the run">{"".join(lanes)}{axis}</svg>'
    return element("figure", element("figcaption", "Modes over the run") + body, "plot wide", data_name="timeline")


def _bars(title: str, axis: str, bars: Sequence[tuple[str, float, str]], css: str) -> str:
    """Return a bar chart of ``(label, height in [0, 1], value)``."""
    width = (WIDTH - 10) / max(8, len(bars))
    drawn = []
    for index, (label, height, value) in enumerate(bars):
        x, tall = 5 + index * width, height * 84
        middle = x + width / 2 - 2
        drawn.append(
            f'<rect class="{css}" x="{x:.1f}" y="{BASE - tall:.1f}" width="{width - 4:.1f}" height="{tall:.1f}"/>'
            f'<text class="value" text-anchor="middle" x="{middle:.1f}" y="{BASE - tall - 4:.1f}">{text(value)}</text>'
            f'<text class="label" text-anchor="middle" x="{middle:.1f}" y="{BASE + 13}">{text(label)}</text>'
        )
    empty = "" if bars else f'<text class="label" x="{WIDTH / 2}" y="60" text-anchor="middle">no drafts yet</text>'
    line = f'<line class="axis" x1="0" y1="{BASE}" x2="{WIDTH}" y2="{BASE}"/>'
    caption = f'<text class="label" text-anchor="middle" x="{WIDTH / 2}" y="{HEIGHT - 1}">{text(axis)}</text>'
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(title)}">'
    body = f"{svg}{line}{''.join(drawn)}{empty}{caption}</svg>"
    return element("figure", element("figcaption", text(title)) + body, "plot", data_name=css)
