"""What the page says equals the records, and nothing a model or a server says becomes markup."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from demo import stats, view
from demo.batch import Row
from demo.frames import final
from demo.handlers import banner, past
from demo.identity import DIFFERENT, Verdict
from demo.plots import plots
from demo.settings import FAST_SIDE, PLAIN_SIDE
from demo.steps import Step
from demo.summary import identity_badge, summary, timing_words
from demo.tracks import Track
from tests.demo.recorded import record, recording

EVIL = '<img src=x onerror="alert(1)">\n</span><script>alert(2)</script>&lt;\'"'


class Reader(HTMLParser):
    """Collects the text of committed and of rejected tokens, and every tag."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.committed: list[str] = []
        self.rejected: list[str] = []
        self._into: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        css = (dict(attrs).get("class") or "").split()
        if "t" in css:
            self._into = self.rejected if "r" in css else self.committed
            self._into.append("")

    def handle_endtag(self, tag: str) -> None:
        self._into = None

    def handle_data(self, data: str) -> None:
        if self._into is not None:
            self._into[-1] += data


def read(markup: str) -> Reader:
    reader = Reader()
    reader.feed(markup)
    reader.close()
    return reader


def figure(markup: str, name: str) -> str:
    (value,) = re.findall(rf'data-name="{name}">([^<]*)<', markup)
    return html.unescape(value)


def test_panel_text_is_the_answer_and_its_rejected_drafts() -> None:
    track = recording(tokens=150).tracks[FAST_SIDE]
    seen = read(view.flow(track.steps))
    assert "".join(seen.committed) == track.text
    assert len(seen.committed) == len(track.ids)
    assert seen.rejected == [step.draft_texts[slot] for step in track.steps for slot in step.rejected]
    assert set(seen.tags) == {"span", "s"}


def test_figures_equal_the_records() -> None:
    track = recording(tokens=150).tracks[FAST_SIDE]
    markup, counts = view.head(track, track.steps), stats.count(track.steps)
    for name in ("tokens", "accepted", "rejected", "bonus", "plain"):
        assert figure(markup, name) == str(vars(counts)[name])
    assert figure(markup, "accept-length") == f"{counts.accept_length:.2f}"
    assert figure(markup, "mode") == track.steps[-1].mode


def test_tips_name_step_slot_confidence_and_mode() -> None:
    line = view.step_line(4, Step(1.0, (6, 8), ("a", "b"), record("parallel", (6, 9), 1, 8), ("a", "c")))
    assert "step 4: parallel, 1 of 2 drafts accepted, 3 mask groups" in line
    assert "slot 1, confidence 0.90: draft, accepted" in line
    assert "slot 2, confidence 0.80: draft, rejected" in line


def test_no_text_becomes_markup() -> None:
    told = record("parallel", (6, 9), 1, 8)
    step = Step(1.0, (6, 8), (EVIL, EVIL), told, (EVIL, EVIL))
    track = Track(FAST_SIDE, [step, step], "failed", EVIL, finish=EVIL, shared=[EVIL])
    evil_mode = replace(step, record=replace(told, mode='"><script>'))
    pieces = [
        view.flow([step, step]),
        view.head(track, [evil_mode], EVIL),
        view.strip([evil_mode]),
        plots([evil_mode], [evil_mode]),
        banner([EVIL]),
        past((("user", EVIL),)),
        timing_words(recording().settings, track, track),
    ]
    for piece in pieces[:-1]:
        assert not {"script", "img"} & set(read(piece).tags), piece
    assert view.flow([step, step]).count("\n") == 1, "one line per step, whatever the tokens say"
    assert "".join(read(view.flow([step])).committed) == EVIL * 2


def test_no_speed_from_a_run_that_shared_the_machine() -> None:
    run = recording()
    clean = final(run)
    assert figure(clean.summary, "speedup") != "–"
    assert figure(clean.heads[FAST_SIDE], "rate") != "–"
    run.tracks[PLAIN_SIDE].share("another run of this page was using the server")
    shared = final(run)
    assert figure(shared.summary, "speedup") == "–"
    assert figure(shared.heads[PLAIN_SIDE], "rate") == "–"
    assert "No speed is quoted" in shared.summary
    assert "another run" in shared.summary


def test_speedup_on_the_page_is_the_computed_one() -> None:
    run = recording()
    expected = stats.speedup(run.tracks[FAST_SIDE].steps, run.tracks[PLAIN_SIDE].steps)
    assert figure(final(run).summary, "speedup") == f"{expected:.2f}×"


@pytest.mark.parametrize("status", ["identical", "different", "sampled", "open"])
def test_identity_badge_says_what_was_computed(status: str) -> None:
    run = recording()
    plain, fast = run.tracks[PLAIN_SIDE], run.tracks[FAST_SIDE]
    badge = identity_badge(Verdict(status, 12, 0.0123), plain, fast, run.servers)
    words = {
        "identical": "Identical text: all 60",
        "different": "token 13",
        "sampled": "not expected",
        "open": "finished",
    }
    assert words[status] in badge
    assert ("0.012 apart" in badge) == (status == DIFFERENT)


def test_different_cache_states_are_said() -> None:
    run = recording()
    run.tracks[FAST_SIDE].cached_tokens = 3
    words = summary(run.settings, run.servers, run.tracks, run.verdict, run.tracks[FAST_SIDE].steps)
    assert "compare decoding, not prefill" in words


def test_batch_rows_start_empty() -> None:
    assert Row("x").tracks[FAST_SIDE].steps == []
