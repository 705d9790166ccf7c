"""Plots as inline SVG: accept-length histogram, acceptance per slot, modes over the run."""

from __future__ import annotations

from collections.abc import Sequence

from demo import stats
from demo.markup import element, text
from demo.steps import Step

WIDTH, HEIGHT, BASE = 300, 130, 104
TIMELINE_MODES = ("prefill", "parallel", "sequential", "plain")


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
    lanes = _lane("plain", plain, end) + _lane("speculative", fast, end)
    ends = element("span", "".join(element("span", f"{share * end:.1f} s") for share in (0, 0.5, 1)), "ends")
    keys = "".join(element("span", "", f"swatch mode-{mode}") + mode for mode in TIMELINE_MODES)
    body = element("div", f"{lanes}<span></span>{ends}", "lanes", role="img", aria_label="Modes over the run")
    return element(
        "figure", element("figcaption", f"Modes over the run{keys}") + body, "plot wide", data_name="timeline"
    )


def _lane(name: str, steps: Sequence[Step], end: float) -> str:
    parts = [
        element(
            "i",
            "",
            f"mode-{mode}",
            style=f"width: {(stop - start) / end:.3%}",
            title=f"{mode}: {start:.2f} to {stop:.2f} s",
        )
        for mode, start, stop in stats.mode_spans(steps)
    ]
    return element("span", name) + element("div", "".join(parts), "lane")


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
