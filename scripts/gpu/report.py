"""The results of a run as a page of tables, and as a picture of speedup by accept length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


DRY = "A dry run on a CPU: no step was timed, and speedups are those of two invented step times."


def is_dry(results: list[dict[str, Any]]) -> bool:
    """True if servers were planned but not started."""
    return any("dry" in row for result in results for row in result["rows"])


def markdown(results: list[dict[str, Any]]) -> str:
    """Return all tables that there are results for."""
    rows = {result["part"]: result["rows"] for result in results}
    sections = [
        f"# GPU check\n\n{DRY}\n" if is_dry(results) else "# GPU check\n",
        _environment(rows.get("environment", [])),
        _kernels(rows.get("kernels", [])),
        _graphs(rows.get("graphs", [])),
        _pieces(rows.get("pieces", [])),
        _engine(rows.get("engine", [])),
        _steps(rows.get("steps", [])),
        _speedups(rows.get("steps", [])),
    ]
    return "\n".join(section for section in sections if section)


def _table(heads: list[str], lines: Iterable[Iterable[Any]]) -> str:
    def line(cells: Iterable[Any]) -> str:
        return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"

    return "\n".join([line(heads), line("---" for _ in heads), *(line(cells) for cells in lines)]) + "\n"


def _environment(rows: list[Row]) -> str:
    lines = [(row["package"], row["version"]) for row in rows if "package" in row]
    for row in rows:
        for name in ("argv", "source", "device", "capability", "memory_gb", "cuda", "python", "cpus", "machine", "at"):
            if name in row:
                value = " ".join(row[name]) if name == "argv" else row[name]
                lines.append((name, value))
        if "tool" in row:
            lines.append((row["tool"], " ".join(row["says"]) if row["says"] else "not found"))
    return f"## Where\n\n{_table(['what', 'value'], lines)}" if lines else ""


def _kernels(rows: list[Row]) -> str:
    """The worst of each form over batches."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["check"].rsplit(" x", 1)[0], []).append(row)
    lines = []
    for name, group in groups.items():
        errors = [row["error"] for row in group if "error" in row]
        passed = sum(row["ok"] for row in group)
        numbers = [row for row in group if "worst" in row]
        worst = max((row["worst"] for row in numbers), default=None)
        largest = max((row["max_error"] for row in numbers), default=None)
        shown = [None if number is None else f"{number:.2e}" for number in (worst, largest)]
        lines.append((name, f"{passed}/{len(group)}", *shown, group[0].get("limit"), errors[0] if errors else ""))
    heads = ["rows, form, head size, types", "passed", "worst relative", "max abs", "limit", "error"]
    return f"## Kernels against fp32\n\n{_table(heads, lines)}" if lines else ""


def _graphs(rows: list[Row]) -> str:
    forms = list(dict.fromkeys(row["form"] for row in rows))
    cells: dict[tuple[int, int, int], dict[str, Any]] = {}
    for row in rows:
        cell = cells.setdefault((row["context"], row["batch"], row["groups"]), {})
        cell[row["form"]] = row["us"] if row["ok"] else "failed"
    lines = [(*cell, *(times.get(form) for form in forms)) for cell, times in cells.items()]
    title = "## One layer's mask rows in a CUDA graph, microseconds"
    return f"{title}\n\n{_table(['context', 'batch', 'groups', *forms], lines)}" if lines else ""


def _pieces(rows: list[Row]) -> str:
    """Comparisons that passed and the worst confidence of each piece, and both times at every batch."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["piece"], []).append(row)
    timed = [row for row in rows if "layout" not in row]
    batches = sorted({row["batch"] for row in timed})
    lines = []
    for name, group in groups.items():
        compared = [row for row in group if "layout" in row]
        worst = max((row["max_error"] for row in compared if "max_error" in row), default=None)
        times = {row["batch"]: f"{row['twin_us']:.1f} / {row['fused_us']:.1f}" if row["ok"] else "failed"
                 for row in timed if row["piece"] == name}  # fmt: skip
        lines.append((name, f"{sum(row['ok'] for row in compared)}/{len(compared)}",
                      None if worst is None else f"{worst:.2e}", *(times.get(batch) for batch in batches)))  # fmt: skip
    heads = ["step", "equal", "max error", *(f"batch {batch}, torch / fused, microseconds" for batch in batches)]
    return f"## Fused steps beside torch\n\n{_table(heads, lines)}" if lines else ""


def _engine(rows: list[Row]) -> str:
    lines = [(row["server"], row["mode"], f"{row.get('equal')}/{row.get('of')}", row.get("worst_gap"),
              row.get("error", "")) for row in rows if "mode" in row]  # fmt: skip
    lines += [(row["server"], "start", "", "", row["error"]) for row in rows if row.get("error") and "mode" not in row]
    heads = ["server", "mode", "equal texts", "worst gap", "error"]
    return f"## Greedy texts beside plain decoding\n\n{_table(heads, lines)}" if lines else ""


def _steps(rows: list[Row]) -> str:
    times: dict[str, dict[int, float]] = {}
    floors: dict[str, Any] = {}
    for row in rows:
        if "run" in row:
            times.setdefault(row["run"], {})[row["batch"]] = row["step_ms"]
            floors.setdefault(row["run"], row["floor_ms"])
    batches = sorted({batch for found in times.values() for batch in found})
    lines = [(name, floors[name], *(found.get(batch) for batch in batches)) for name, found in times.items()]
    heads = ["step, ms", "floor at batch 1", *(f"batch {batch}" for batch in batches)]
    steps = f"## Steps of a random Qwen3-8B\n\n{_table(heads, lines)}" if lines else ""
    servers = [(row["server"], row.get("start_seconds"), row.get("memory_gb"), row.get("error"))
               for row in rows if "server" in row]  # fmt: skip
    heads = ["server", "start, s", "memory in use, GB", "error"]
    return steps + (f"\n{_table(heads, servers)}" if servers else "")


def _speedups(rows: list[Row]) -> str:
    found = [row for row in rows if "speedup_of" in row]
    if not found:
        return ""
    lengths = list(found[0]["by_accept_length"])
    lines = [(row["speedup_of"], row["batch"], row["breaks_even_at"], *row["by_accept_length"].values())
             for row in found]  # fmt: skip
    text = "## Speedup over plain decoding with graphs, by accept length\n\n"
    text += _table(["step", "batch", "breaks even at", *lengths], lines)
    marked = [(row["speedup_of"], row["batch"], label, mark["accept_length"], mark["speedup"])
              for row in found for label, mark in row["published"].items()]  # fmt: skip
    if marked:
        text += "\nAt published accept lengths; these steps, not the papers' speedups:\n\n"
        text += _table(["step", "batch", "published for", "accept length", "speedup"], marked)
    return text


WIDTH, HEIGHT, MARGIN = 720, 420, 50
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")


def picture(results: list[dict[str, Any]], batch: int = 1) -> str:
    """Draw speedup over accept length at one batch as SVG, published accept lengths as dots; empty without results."""
    rows = [row for result in results for row in result["rows"] if row.get("speedup_of") and row["batch"] == batch]
    if not rows:
        return ""
    lines = {
        row["speedup_of"]: {float(length): value for length, value in row["by_accept_length"].items()} for row in rows
    }
    far = max(max(points) for points in lines.values())
    high = max(max(points.values()) for points in lines.values())

    def place(length: float, value: float) -> str:
        x = MARGIN + length / far * (WIDTH - 2 * MARGIN)
        y = HEIGHT - MARGIN - value / high * (HEIGHT - 2 * MARGIN)
        return f"{x:.1f},{y:.1f}"

    def text(at: str, words: str, colour: str = "#333") -> str:
        x, y = at.split(",")
        return f'<text x="{x}" y="{y}" fill="{colour}" font-size="12" font-family="sans-serif">{words}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<polyline points="{place(0, high)} {place(0, 0)} {place(far, 0)}" fill="none" stroke="#333"/>',
        f'<polyline points="{place(0, 1)} {place(far, 1)}" stroke="#999" stroke-dasharray="4"/>',
        text(f"{WIDTH / 2 - 60},{HEIGHT - 10}", "tokens per step (accept length)"),
        text(f"{MARGIN},{MARGIN - 25}", f"speedup over plain decoding with graphs, batch {batch}, up to {high:.2f}"),
    ]
    if is_dry(results):
        parts.append(text(f"{MARGIN},{MARGIN - 10}", DRY, COLOURS[1]))
    parts += [text(place(length, -high / 20), str(length)) for length in range(1, int(far) + 1)]
    for index, row in enumerate(rows):
        colour, points = COLOURS[index % len(COLOURS)], lines[row["speedup_of"]]
        path = " ".join(place(length, value) for length, value in points.items())
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(text(f"{MARGIN + 12},{MARGIN + 16 * index}", row["speedup_of"], colour))
        for label, mark in row["published"].items():
            x, y = place(mark["accept_length"], mark["speedup"]).split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"><title>{label}</title></circle>')
    return "\n".join([*parts, "</svg>"]) + "\n"
