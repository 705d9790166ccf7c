"""The page in a browser, against a real server with the default target."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from demo import stats
from demo.browser import Page
from demo.recording import read_recording
from demo.settings import FAST_SIDE, PLAIN_SIDE
from sglang_ext.testing.server import Server
from tests.browser.conftest import Proxy, demo
from tests.demo.recorded import recording

Open = Callable[..., Page]


def wait_idle(server: Server, seconds: float = 10.0) -> None:
    """Wait until the server has nothing in hand."""
    deadline = time.monotonic() + seconds
    while any(server.load()[key] for key in ("num_running_reqs", "num_waiting_reqs")):
        assert time.monotonic() < deadline, "the server still works for a page that left"
        time.sleep(0.1)


def seconds_until_closed(upstream: Proxy) -> float:
    """Wait until the demo holds no connection to its server; return how long that took."""
    started = time.monotonic()
    while upstream.connections and time.monotonic() < started + 10:
        time.sleep(0.01)
    return time.monotonic() - started


def test_the_page_says_what_the_records_say(open_page: Open, demo_url: str) -> None:
    """Type, run, see colours; every count on the page equals the step records of the saved run."""
    page = open_page(demo_url).wait_served().number("max-tokens", 32).choose("mode", "parallel")
    page.prompt("A box holds 12 eggs. How many eggs are in 7 boxes?").run().wait_done()
    run = read_recording(page.saved())
    plain, fast = run.tracks[PLAIN_SIDE], run.tracks[FAST_SIDE]
    counts = stats.count(fast.steps)
    assert run.settings.messages == (("user", "A box holds 12 eggs. How many eggs are in 7 boxes?"),)
    assert {step.mode for step in fast.steps} == {"prefill", "parallel"}
    assert counts.accepted > 0 and counts.rejected > 0
    assert (page.answer("plain"), page.answer("fast")) == (plain.text, fast.text)
    shown = [page.tokens("fast", kind) for kind in "abpr"]
    assert shown == [counts.accepted, counts.bonus, counts.plain, counts.rejected]
    assert sum(shown[:3]) == counts.tokens == len(fast.ids)
    for name in ("tokens", "accepted", "rejected", "bonus", "plain"):
        assert page.figure("fast-head", name) == str(vars(counts)[name])
    assert page.figure("fast-head", "accept-length") == f"{counts.accept_length:.2f}"
    assert page.figure("fast-head", "mode") == "parallel"
    assert page.figure("plain-head", "mode") == "plain"
    assert page.figure("summary", "speedup") == f"{stats.speedup(fast.steps, plain.steps):.2f}×"
    expected = "Identical text" if plain.ids == fast.ids else "Different text"
    assert expected in page.figure("summary", "identity")
    assert plain.cached_tokens == fast.cached_tokens > 0, "both sides start from the same warm cache"
    assert "one after the other" in page.figure("summary", "timing")
    bars = page.page.locator("#plots [data-name=bar-accept] rect").count()
    assert bars == len(stats.accept_histogram(fast.steps))


def test_kinds_differ_in_colour_and_shape_and_explain_themselves(open_page: Open, demo_url: str) -> None:
    page = open_page(demo_url).wait_served().number("max-tokens", 24).choose("mode", "sequential").run().wait_done()
    style = (
        "e => { const s = getComputedStyle(e); return [s.backgroundColor, s.borderBottomStyle, s.textDecorationLine] }"
    )
    looks = [tuple(page.page.locator(f"#fast-flow .t.{kind}").first.evaluate(style)) for kind in "abpr"]
    assert len(set(looks)) == 4
    assert looks[3][2] == "line-through"
    page.page.locator("#fast-flow .t.r").first.hover()
    tip = page.page.locator("#fast-flow .tip")
    assert all(word in tip.inner_text() for word in ("step", "slot", "confidence", "sequential", "rejected"))
    page.page.locator("#fast-flow .flow").focus()
    page.page.keyboard.press("Home")
    assert "step 0: prefill" in tip.inner_text()
    page.page.keyboard.press("ArrowRight")
    assert "step 1: sequential" in tip.inner_text()
    page.page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_stop_stops_the_server_and_the_page_goes_on(
    open_page: Open, demo_url: str, server: Server, upstream: Proxy
) -> None:
    """Law D1: within a second."""
    page = open_page(demo_url).wait_served().number("max-tokens", 600).prompt("Tell me a long story.").run()
    page.wait_steps("plain", 4)
    assert upstream.connections == 1
    page.page.click("#stop")
    assert seconds_until_closed(upstream) < 1.0
    wait_idle(server)
    page.wait_done()
    assert page.figure("plain-head", "state") == "stopped"
    assert page.figure("summary", "speedup") == "–"
    page.number("max-tokens", 8).run().wait_done()
    assert page.figure("plain-head", "tokens") == "8"


def test_closing_the_tab_stops_the_server(open_page: Open, demo_url: str, server: Server, upstream: Proxy) -> None:
    """Law D1: within a second."""
    page = open_page(demo_url).wait_served().number("max-tokens", 600).prompt("Tell me a long story.").run()
    page.wait_steps("plain", 4)
    assert upstream.connections == 1
    page.page.close()
    assert seconds_until_closed(upstream) < 1.0
    wait_idle(server)


def test_a_second_turn_continues_the_conversation(open_page: Open, demo_url: str) -> None:
    """Law D3."""
    page = open_page(demo_url).wait_served().number("max-tokens", 8).prompt("Say hello.").run().wait_done()
    first = page.answer("fast")
    evil = "<img src=x onerror='window.broken=1'>And now?"
    page.page.check("#follow-up input")
    page.prompt(evil).run().wait_done()
    messages = read_recording(page.saved()).settings.messages
    assert messages == (("user", "Say hello."), ("assistant", first), ("user", evil))
    assert "Say hello." in page.page.inner_text("#past")
    assert page.page.evaluate("window.broken") is None
    assert page.page.locator("#curl img, .past img").count() == 0


def test_two_visitors_stream_at_once(open_page: Open, demo_url: str) -> None:
    """Law D2; and neither run is a measurement."""
    pages = [open_page(demo_url).wait_served().number("max-tokens", 60) for _ in range(2)]
    for page in pages:
        page.prompt("Tell me a long story.").run()
    for page in pages:
        page.wait_steps("plain", 3)
    assert all(page.page.locator("#stop:not([disabled])").count() for page in pages), "both still stream"
    for page in pages:
        page.wait_done()
        assert page.figure("summary", "speedup") == "–"
        assert "No speed is quoted" in page.figure("summary", "timing")


def test_background_requests_grow_the_batch(open_page: Open, demo_url: str, server: Server) -> None:
    page = open_page(demo_url).wait_served().number("max-tokens", 12).number("background", 3).run().wait_done()
    wait_idle(server)
    run = read_recording(page.saved())
    assert max(step.record.batch_size for step in run.tracks[FAST_SIDE].steps if step.record) == 4
    assert page.figure("summary", "speedup") == "–"
    assert "background requests" in page.figure("summary", "timing")


def test_live_panels_say_that_nothing_was_measured(open_page: Open, demo_url: str) -> None:
    page = open_page(demo_url).wait_served().number("max-tokens", 10).choose("timing", "both live").run().wait_done()
    assert page.figure("fast-head", "rate") == page.figure("plain-head", "rate") == "–"
    assert "both panels ran at once" in page.figure("summary", "timing")


def test_the_command_asks_the_same(open_page: Open, demo_url: str) -> None:
    page = open_page(demo_url).wait_served().number("max-tokens", 10).choose("mode", "plain")
    page.prompt('What\'s "2 + 2"?\nAnswer.').run().wait_done()
    command = page.page.evaluate("document.querySelector('#curl .cm-content').innerText.replaceAll('\\n', '')")
    answer = json.loads(subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout)
    assert answer["choices"][0]["message"]["content"] == page.answer("plain")


def test_a_batch_shows_both_throughputs(open_page: Open, demo_url: str) -> None:
    page = open_page(demo_url).wait_served().number("max-tokens", 8)
    page.page.get_by_role("tab", name="Batch").click()
    count = page.page.locator("#batch-count input[type=number]")
    count.fill("3")
    count.press("Tab")
    page.page.click("#batch-run")
    page.page.wait_for_selector("#batch-run[disabled]", timeout=60_000)
    page.page.wait_for_selector("#batch-run:not([disabled])", timeout=600_000)
    assert page.page.locator("table.batch tr").count() == 4
    assert page.figure("batch-view", "batch-state") == "finished"
    ratio, plain, fast = (page.figure("batch-view", f"batch-{name}") for name in ("ratio", "plain", "fast"))
    assert float(fast) / float(plain) == pytest.approx(float(ratio.rstrip("×")), abs=0.1)


def test_a_server_that_vanishes_is_said_and_comes_back(open_page: Open, proxy: Proxy) -> None:
    """Law D4, and dying in the middle of a stream."""
    with demo("--url", proxy.url) as url:
        page = open_page(url).wait_served().number("max-tokens", 300).prompt("Tell me a long story.").run()
        page.wait_steps("plain", 3)
        proxy.cut()
        page.wait_done()
        assert "went away" in page.page.inner_text("#plain-head .problem") or "closed" in page.page.inner_text(
            "#plain-head .problem"
        )
        assert page.page.locator("#run:not([disabled])").count() == 1
        page.run().page.wait_for_selector("#banner .banner", timeout=60_000)
        assert "connection refused" in page.page.inner_text("#banner")
        proxy.listen()
        page.page.click("#connect")
        page.page.wait_for_selector("#banner .banner", state="hidden", timeout=60_000)
        page.number("max-tokens", 6).run().wait_done()
        assert page.figure("fast-head", "tokens") == "6"


def test_nobody_at_the_address(open_page: Open) -> None:
    with demo("--url", "http://127.0.0.1:9") as url:
        page = open_page(url)
        page.page.wait_for_selector("#banner .banner", timeout=60_000)
        assert "no server answers at http://127.0.0.1:9" in page.page.inner_text("#banner")
        assert page.page.locator("#run[disabled]").count() == 1


def test_500_tokens_a_second_from_a_file(open_page: Open, tmp_path: Path) -> None:
    """Law D5: 2,000 tokens, at most 20 updates a second, the exact text at the end, colours that add up."""
    run = recording(tokens=2000, rate=500.0)
    run.tracks[PLAIN_SIDE].steps = run.tracks[PLAIN_SIDE].steps[:20]
    file = tmp_path / "run.json"
    file.write_text(run.to_json(), encoding="utf-8")
    with demo("--replay", str(file)) as url:
        page = open_page(url)
        page.page.wait_for_selector("#replay:not([disabled])", timeout=60_000)
        page.page.evaluate(
            "() => { window.seen = []; new MutationObserver(() => seen.push(performance.now()))"
            ".observe(document.querySelector('#fast-flow .flow'), {childList: true}) }"
        )
        page.page.click("#replay")
        page.page.wait_for_selector("#stop:not([disabled])")
        page.wait_done()
        times = page.page.evaluate("seen")
        seconds = (times[-1] - times[0]) / 1000
        assert len(times) <= 20 * max(seconds, 1.0) + 2, f"{len(times)} updates in {seconds:.1f} s"
        track = run.tracks[FAST_SIDE]
        assert page.answer("fast") == track.text
        assert sum(page.tokens("fast", kind) for kind in "abp") == 2000
        assert page.tokens("fast", "r") == stats.count(track.steps).rejected
        assert page.page.locator("#fast-flow b, #fast-flow script").count() == 0, "texts hold <b> and stay text"


@pytest.mark.parametrize("width", [390, 1280])
def test_phone_and_desktop_dark_and_light(open_page: Open, tmp_path: Path, width: int) -> None:
    file = tmp_path / "run.json"
    file.write_text(recording().to_json(), encoding="utf-8")
    with demo("--replay", str(file)) as url:
        page = open_page(url, width=width)
        page.page.wait_for_selector("#replay:not([disabled])", timeout=60_000)
        assert page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        background = "getComputedStyle(document.querySelector('#fast-flow .flow')).backgroundColor"
        before = page.page.evaluate(background)
        page.page.click("#theme")
        page.page.wait_for_function(f"{background} !== {json.dumps(before)}")


def test_other_files_are_refused_in_words(open_page: Open, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(recording().to_json(), encoding="utf-8")
    bad.write_text('{"format": "something else"}', encoding="utf-8")
    with demo("--replay", str(good)) as url:
        page = open_page(url)
        page.page.wait_for_selector("#replay:not([disabled])", timeout=60_000)
        page.open(str(bad))
        page.page.wait_for_selector("#banner .banner", timeout=60_000)
        assert "holds no saved run" in page.page.inner_text("#banner")
        page.open(str(good))
        page.page.wait_for_selector("#banner .banner", state="hidden", timeout=60_000)
