"""One picture of a benchmark: speed by batch size, and acceptance by draft position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sglang_ext.bench.report import Acceptance, Row, arms_of
from sglang_ext.bench.runner import OVERRIDE, PLAIN

COLORS = {
    PLAIN: "#9aa5b1",
    OVERRIDE: "#c9d1d9",
    "flexdraft": "#2563eb",
    "dflare": "#d97706",
    "dflash": "#0f766e",
    "ngram": "#9333ea",
}
LINES = ("o-", "s--", "^:")


def is_available() -> bool:
    """Return whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def draw(path: Path, table: Sequence[Row], accepted: Sequence[Acceptance], subtitle: str) -> None:
    """Write a PNG: one panel of bars per dataset, and one panel of acceptance if there are step records."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    datasets = list(dict.fromkeys(row.dataset for row in table))
    panels = len(datasets) + bool(accepted)
    figure, axes = pyplot.subplots(1, panels, figsize=(4.6 * panels, 4.2), squeeze=False, layout="constrained")
    for axis, dataset in zip(axes[0], datasets, strict=False):
        _bars(axis, [row for row in table if row.dataset == dataset])
        axis.set_title(dataset)
    if accepted:
        _curves(axes[0][-1], accepted)
    figure.suptitle(subtitle, fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bars(axis, table: Sequence[Row]) -> None:  # type: ignore[no-untyped-def]
    plain = arms_of(table[0].decode_tok_s, plain=True)
    arms = [*plain, *arms_of((row.arm for row in table), plain=False)]
    batches = list(dict.fromkeys(row.batch for row in table))
    width = 0.8 / len(arms)
    top = max(max(row.decode_tok_s.values()) for row in table)
    for number, arm in enumerate(arms):
        # Every method's row repeats the plain arms.
        rows = {row.batch: row for row in table if arm in row.decode_tok_s}
        places = [index + (number - (len(arms) - 1) / 2) * width for index in range(len(batches))]
        heights = [rows[batch].decode_tok_s[arm] for batch in batches]
        axis.bar(places, heights, width, label=arm, color=COLORS[arm])
        if arm in plain:
            continue
        for place, batch, height in zip(places, batches, heights, strict=True):
            ratio = rows[batch].decode_ratio[plain[0]].estimate
            axis.text(place, height + 0.02 * top, f"{ratio:.2f}x", ha="center", fontsize=9 if len(arms) < 4 else 7)
    axis.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axis.set_ylabel("decoded tokens a second")
    axis.set_ylim(0, 1.12 * top)
    axis.legend(frameon=False, fontsize=8, loc="upper left")
    axis.spines[["top", "right"]].set_visible(False)


def _curves(axis, accepted: Sequence[Acceptance]) -> None:  # type: ignore[no-untyped-def]
    datasets = list(dict.fromkeys(item.dataset for item in accepted))
    for item in accepted:
        reached = [rate for rate in item.positions if rate.reached]
        axis.plot(
            [rate.position for rate in reached],
            [rate.conditional for rate in reached],
            LINES[datasets.index(item.dataset) % len(LINES)],
            color=COLORS[item.arm],
            label=f"{item.arm}, {item.dataset}",
        )
    axis.set_ylim(0, 1)
    axis.set_xticks(range(1, 1 + max(len(item.positions) for item in accepted)))
    axis.set_xlabel("draft position")
    axis.set_ylabel("accepted, if all before were")
    axis.set_title("acceptance")
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
