"""The line above the panels: speed-up, whether the texts are equal, and how the times were taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from demo import stats
from demo.facts import Facts
from demo.identity import DIFFERENT, IDENTICAL, OPEN, SAMPLED, Verdict
from demo.markup import element, number, text
from demo.settings import AUTO, FAST_SIDE, LIVE, PLAIN_SIDE, Settings
from demo.steps import Step
from demo.tracks import DONE, FAILED, Track

AUTO_STEPS = 8
TIE_GAP = 0.13
"""Two log-probabilities this close are one step of bfloat16 apart where logits are between 16 and 32."""


def summary(
    settings: Settings,
    servers: Mapping[str, Facts],
    tracks: Mapping[str, Track],
    verdict: Verdict,
    fast_steps: Sequence[Step],
) -> str:
    """Return the summary of a run; ``fast_steps`` are the visible steps of the speculative side."""
    plain, fast = tracks[PLAIN_SIDE], tracks[FAST_SIDE]
    parts = [
        _speed(plain, fast, fast_steps),
        identity_badge(verdict, plain, fast, servers),
        element(
            "p", text(timing_words(settings, plain, fast) + mode_words(settings, fast)), "timing", data_name="timing"
        ),
    ]
    return element("div", "".join(parts), "summary", aria_live="polite")


def _speed(plain: Track, fast: Track, fast_steps: Sequence[Step]) -> str:
    value, words = None, "decoding speed-up"
    if plain.status == DONE and not plain.shared and not fast.shared and fast.status != FAILED:
        value = stats.speedup(fast_steps, plain.steps)
        done = fast.status == DONE and len(fast_steps) == len(fast.steps)
        words = "decoding speed-up" if done else "decoding speed-up so far"
    figure = element("span", text(number(value, 2, "×")), "big", data_name="speedup")
    return element("div", figure + element("span", text(words), "under"), "speed")


def identity_badge(verdict: Verdict, plain: Track, fast: Track, servers: Mapping[str, Facts]) -> str:
    """Return the badge that says whether the two texts are equal, and where they part if not."""
    words = {
        IDENTICAL: f"Identical text: all {len(fast.ids)} tokens and every character are equal.",
        DIFFERENT: _difference(verdict, plain, fast, servers),
        SAMPLED: "Sampled with temperature: equal texts are not expected, only equally likely ones.",
        OPEN: "Texts are compared when both sides have finished.",
    }[verdict.status]
    return element("p", text(words), f"identity {verdict.status}", data_name="identity")


def _difference(verdict: Verdict, plain: Track, fast: Track, servers: Mapping[str, Facts]) -> str:
    if verdict.common == min(len(plain.ids), len(fast.ids)):
        return f"Different text: one answer ends after {verdict.common} equal tokens, the other goes on."
    where = f"Different text from token {verdict.common + 1} on."
    if verdict.gap is None:
        return where
    dtype = servers[PLAIN_SIDE].dtype if PLAIN_SIDE in servers else ""
    precision = f" (precision: {dtype})" if dtype not in ("", "auto") else ""
    meaning = "a tie by rounding" if verdict.gap <= TIE_GAP else "more than rounding in half precision explains"
    return (
        f"{where} There, the log-probabilities of the two tokens are {verdict.gap:.3f} apart in plain decoding"
        f"{precision}: {meaning}."
    )


def timing_words(settings: Settings, plain: Track, fast: Track) -> str:
    """Say how the times on the page were taken, or why there is no speed to quote."""
    reasons = list(dict.fromkeys([*plain.shared, *fast.shared]))
    if reasons:
        return f"No speed is quoted: {'; '.join(reasons)}. Run again with one panel after the other, and alone."
    if settings.timing == LIVE:
        return "Both panels run at once and slow each other down: no speed is quoted."
    words = "Measured one after the other, each side with the server to itself; shown in step."
    busy = plain.machine or fast.machine
    if busy:
        words += f" But {busy}: expect other numbers when it is idle."
    if plain.prompt_tokens and fast.prompt_tokens:
        if plain.cached_tokens == fast.cached_tokens:
            words += f" Both found {fast.cached_tokens} of {fast.prompt_tokens} prompt tokens in the prefix cache."
        else:
            words += (
                f" The prefix cache held {plain.cached_tokens} prompt tokens for plain decoding and "
                f"{fast.cached_tokens} for speculative decoding: compare decoding, not prefill."
            )
    return words


def mode_words(settings: Settings, fast: Track) -> str:
    """Say what ``auto`` decided where the audience would otherwise wonder why nothing was drafted."""
    decoding = [step.mode for step in list(fast.steps) if step.mode != "prefill"]
    if settings.mode != AUTO or len(decoding) < AUTO_STEPS or decoding.count("plain") * 2 < len(decoding):
        return ""
    return (
        " Mode auto takes what the server measures to be fastest: here, mostly plain decoding. To watch drafts all the "
        "same, choose mode parallel or sequential in Settings."
    )
