"""The panels as HTML: one line per step for the text, a head with numbers, a strip with verify lengths."""

from __future__ import annotations

from collections.abc import Sequence

from demo import stats
from demo.markup import element, number, text
from demo.settings import FAST_SIDE, PLAIN_SIDE
from demo.steps import ACCEPTED, BONUS, NOT_SPECULATIVE, PLAIN, UNKNOWN, Step
from demo.tracks import DONE, FAILED, RUNNING, STOPPED, WAITING, Track

CLASSES = {ACCEPTED: "a", BONUS: "b", PLAIN: "p"}
WORDS = {ACCEPTED: "draft, accepted", BONUS: "the target's own token", PLAIN: "the target's own token"}
TITLES = {PLAIN_SIDE: "Plain decoding", FAST_SIDE: "Speculative decoding"}
MODE_LABELS = {UNKNOWN: "no telemetry"}
STRIP_STEPS = 48


def flow(steps: Sequence[Step]) -> str:
    """Return the text panel: one line of HTML per step, so that a page only adds what is new."""
    return "\n".join(step_line(index, step) for index, step in enumerate(steps))


def step_line(index: int, step: Step) -> str:
    """Return one step: accepted drafts, then what was rejected, then the target's own token."""
    tokens = [_token(step, slot) for slot in range(len(step.ids))]
    rejected = [_rejected(step, slot) for slot in step.rejected]
    accepted = step.kinds.count(ACCEPTED)
    content = "".join([*tokens[:accepted], *rejected, *tokens[accepted:]])
    return element("span", content, "st", data_tip=step_tip(index, step))


def step_tip(index: int, step: Step) -> str:
    """Return what the page says about a step when asked."""
    record = step.record
    if record is None:
        return f"arrival {index}"
    if record.mode == "prefill":
        return f"step {index}: prefill, {record.step_ms:.1f} ms, batch of {record.batch_size}"
    drafts = f"{record.accepted} of {record.verify_length} drafts accepted" if record.verify_length else "no drafts"
    groups = f", {record.groups} mask groups" if record.groups else ""
    return f"step {index}: {record.mode}, {drafts}{groups}, {record.step_ms:.1f} ms, batch of {record.batch_size}"


def _token(step: Step, slot: int) -> str:
    kind = step.kinds[slot]
    tip = WORDS[kind]
    if kind == ACCEPTED and step.record is not None:
        tip = f"slot {slot + 1}, confidence {step.record.confidence[slot]:.2f}: {tip}"
    css = f"t {CLASSES[kind]}" + ("" if step.texts[slot] else " e")
    return element("span", text(step.texts[slot]), css, data_x=tip)


def _rejected(step: Step, slot: int) -> str:
    confidence = step.record.confidence[slot] if step.record is not None else 0.0
    tip = f"slot {slot + 1}, confidence {confidence:.2f}: draft, rejected"
    return element("s", text(step.draft_texts[slot]), "t r", data_x=tip)


def head(track: Track, steps: Sequence[Step], note: str = "") -> str:
    """Return a panel's head for the visible ``steps`` of a track; ``note`` says what the panel does now."""
    mode = steps[-1].mode if steps else ""
    badge = element("span", text(MODE_LABELS.get(mode, mode) or "–"), f"badge mode-{mode or 'none'}", data_name="mode")
    title = element("h3", text(TITLES[track.side]))
    state = element("span", text(note or state_words(track)), "state", data_name="state")
    top = element("div", title + badge + state, "panel-top")
    problem = element("p", text(track.message), "problem", role="alert") if track.message else ""
    return top + problem + numbers(track, steps)


def state_words(track: Track) -> str:
    """Return a track's state in a few words."""
    return {
        WAITING: "waiting",
        RUNNING: "running",
        DONE: f"finished ({track.finish})",
        STOPPED: "stopped",
        FAILED: "failed",
    }[track.status]


def numbers(track: Track, steps: Sequence[Step]) -> str:
    """Return the figures of a panel. A rate appears only if the track has the machine to itself."""
    counts, timing = stats.count(steps), stats.time(steps)
    rate = None if timing is None or track.shared else timing.rate
    figures = [
        ("rate", "tokens/s", number(rate)),
        ("tokens", "tokens", str(counts.tokens)),
        ("decode", "decoding", number(None if timing is None else timing.decode_s, 2, " s")),
        ("prefill", "prefill", number(None if timing is None else timing.prefill_s, 2, " s")),
        ("queue", "queue, network", number(None if timing is None else timing.queue_s, 2, " s")),
    ]
    if timing is not None and timing.prefill_s is None:
        figures[-2:] = [("first", "first token after", number(timing.first_s, 2, " s"))]
    if track.side == FAST_SIDE:
        figures += [
            ("accept-length", "accept length", number(counts.accept_length, 2)),
            ("accepted", "drafts accepted", str(counts.accepted)),
            ("rejected", "rejected", str(counts.rejected)),
            ("bonus", "bonus tokens", str(counts.bonus)),
            ("plain", "plain tokens", str(counts.plain)),
        ]
    cells = "".join(
        element("div", element("dt", text(label)) + element("dd", text(value), data_name=name), "figure")
        for name, label, value in figures
    )
    return element("dl", cells, "figures")


def strip(steps: Sequence[Step]) -> str:
    """Return the last steps as bars: height is the verify length, the filled part was accepted, below are groups."""
    shown = [step for step in steps if step.mode not in ("prefill", UNKNOWN)][-STRIP_STEPS:]
    highest = max([7, *(step.record.verify_length for step in shown if step.record is not None)])
    unit, width = 34 / highest, 9
    bars = []
    for index, step in enumerate(shown):
        record = step.record
        if record is None:
            continue
        x, tall, filled = index * width, record.verify_length * unit, record.accepted * unit
        bars.append(
            f'<rect class="s-base mode-{text(record.mode)}" x="{x}" y="36" width="8" height="3"/>'
            f'<rect class="s-verify" x="{x}" y="{35 - tall:.1f}" width="8" height="{tall:.1f}"/>'
            f'<rect class="s-accept" x="{x}" y="{35 - filled:.1f}" width="8" height="{filled:.1f}"/>'
        )
        if record.groups:
            bars.append(f'<text class="s-groups" x="{x + 4}" y="48">{record.groups}</text>')
    label = "Verify length per step; the filled part was accepted; below: mask groups that joined the pass"
    box = f'viewBox="0 0 {STRIP_STEPS * width} 50" preserveAspectRatio="xMinYMid meet" role="img"'
    return f'<svg class="strip" {box} aria-label="{label}"><title>{label}</title>{"".join(bars)}</svg>'


def is_speculative(steps: Sequence[Step]) -> bool:
    """Return whether any step could verify drafts."""
    return any(step.mode not in (*NOT_SPECULATIVE, UNKNOWN) for step in steps)
