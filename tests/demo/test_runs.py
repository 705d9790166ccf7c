"""Runs against a server that fails on demand: what is stopped stops, what breaks is said, nothing hangs."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from demo.background import Background
from demo.batch import BatchRun
from demo.client import Client, ServerProblem
from demo.facts import ask_facts
from demo.pool import Pool
from demo.runs import BOTH_AT_ONCE, OTHER_PAGE, Run
from demo.settings import FAST_SIDE, LIVE, PLAIN_SIDE, SIDES, Settings
from demo.tracks import DONE, FAILED, STOPPED
from sglang_ext.core.refusal import Refusal
from tests.demo.fake_sglang import Behaviour, serving


def settings(tokens: int = 12, **given: object) -> Settings:
    return Settings((("user", "Hello?"),), max_new_tokens=tokens, **given)  # type: ignore[arg-type]


def begin(pool: Pool, asked: Settings) -> Run:
    return Run(asked, pool.endpoints(None), pool.occupancy).start()


def connected(url: str) -> Pool:
    pool = Pool([url], None)
    assert pool.refresh() == []
    return pool


def wait(condition: Callable[[], bool], seconds: float = 10.0) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds
        time.sleep(0.005)
    return time.monotonic() - started


def test_a_run_asks_one_side_after_the_other() -> None:
    behaviour = Behaviour()
    with serving(behaviour) as url:
        run = begin(connected(url), settings(mode="parallel"))
        run.join(20)
    assert run.problem == ""
    assert [run.tracks[side].status for side in SIDES] == [DONE, DONE]
    assert behaviour.most == 1
    custom = [body["sampling_params"]["custom_params"]["speculative"] for body in behaviour.bodies]
    assert custom == [{"mode": "plain", "records": True}, {"mode": "parallel", "records": True}]
    assert run.verdict.status == "identical"
    assert run.tracks[FAST_SIDE].measured


def test_live_panels_run_at_once_and_quote_no_speed() -> None:
    behaviour = Behaviour(interval_s=0.03)
    with serving(behaviour) as url:
        run = begin(connected(url), settings(timing=LIVE))
        run.join(20)
    assert behaviour.most == 2
    assert all(track.shared == [BOTH_AT_ONCE] for track in run.tracks.values())


def test_stop_closes_the_stream_within_a_second() -> None:
    """Law D1."""
    behaviour = Behaviour(interval_s=0.02)
    with serving(behaviour) as url:
        run = begin(connected(url), settings(5000))
        wait(lambda: len(run.tracks[PLAIN_SIDE].steps) > 3)
        run.stop()
        assert wait(lambda: bool(behaviour.closed)) < 1.0
        assert wait(lambda: behaviour.aborted == [behaviour.bodies[0]["rid"]]) < 1.0
        run.join(5)
    assert run.finished
    assert run.tracks[PLAIN_SIDE].status == STOPPED
    assert len(behaviour.bodies) == 1, "the other side is not asked after a stop"


def test_two_pages_stream_at_once_and_neither_is_a_measurement() -> None:
    """Law D2."""
    behaviour = Behaviour(interval_s=0.03)
    with serving(behaviour) as url:
        pool = connected(url)
        runs = [begin(pool, settings(150)) for _ in range(2)]
        wait(lambda: all(len(run.tracks[PLAIN_SIDE].steps) > 2 for run in runs))
        assert behaviour.most == 2
        for run in runs:
            run.join(30)
    for run in runs:
        assert OTHER_PAGE in run.tracks[PLAIN_SIDE].shared
        assert not run.tracks[PLAIN_SIDE].measured


def test_a_failing_server_is_quoted() -> None:
    """Law D4, the server's side."""
    behaviour = Behaviour()
    with serving(behaviour) as url:
        pool = connected(url)
        behaviour.fail = 500
        run = begin(pool, settings())
        run.join(20)
        assert [run.tracks[side].status for side in SIDES] == [FAILED, FAILED]
        assert "status 500: the scheduler fell over" in run.tracks[FAST_SIDE].message
        behaviour.fail = 200
        run = begin(pool, settings())
        run.join(20)
        assert run.tracks[FAST_SIDE].status == DONE


def test_a_server_that_dies_mid_stream_keeps_what_came() -> None:
    behaviour = Behaviour(die_after=5)
    with serving(behaviour) as url:
        run = begin(connected(url), settings())
        run.join(20)
    track = run.tracks[PLAIN_SIDE]
    assert track.status == FAILED
    assert len(track.ids) == 5
    assert "closed the stream before the answer was complete" in track.message


def test_a_server_gone_before_the_run_is_said() -> None:
    with serving(Behaviour()) as url:
        pool = connected(url)
    run = begin(pool, settings())
    run.join(20)
    assert run.finished
    assert "connection refused" in run.problem
    assert "sglang-ext serve" in run.problem
    assert all(track.status == FAILED for track in run.tracks.values())


def test_a_server_without_telemetry_is_named_and_still_answers() -> None:
    behaviour = Behaviour(telemetry=False)
    with serving(behaviour) as url:
        pool = Pool([url], None)
        (problem,) = pool.refresh()
        assert "--speculative-algorithm flexdraft" in problem
        run = begin(pool, settings())
        run.join(20)
    assert run.tracks[FAST_SIDE].status == DONE
    assert {step.mode for step in run.tracks[FAST_SIDE].steps} == {"unknown"}
    assert all("custom_params" not in body["sampling_params"] for body in behaviour.bodies)


def test_a_plain_server_answers_the_plain_side() -> None:
    plain, fast = Behaviour(telemetry=False), Behaviour()
    with serving(plain) as plain_url, serving(fast) as url:
        pool = Pool([url], plain_url)
        assert pool.refresh() == []
        begin(pool, settings()).join(20)
    assert len(plain.bodies) == len(fast.bodies) == 1


def test_the_drafter_chosen_on_the_page_answers() -> None:
    one, other = Behaviour(), Behaviour(algorithm="DFLARE")
    with serving(one) as first, serving(other) as second:
        pool = Pool([first, second], None)
        assert pool.refresh() == []
        assert list(pool.drafters()) == ["FlexDraft", "DFlare"]
        Run(settings(), pool.endpoints("DFlare"), pool.occupancy).start().join(20)
        assert (len(one.bodies), len(other.bodies)) == (0, 2)
        other.algorithm = "FLEXDRAFT"
        pool.refresh()
        assert list(pool.drafters()) == [f"FlexDraft at {url}" for url in (first, second)]


@pytest.mark.parametrize(
    "url", ["", "ftp://here", "http://", "http://host:port", "http://127.0.0.1:1/v1", "host:99999"]
)
def test_malformed_addresses_are_refused(url: str) -> None:
    with pytest.raises(Refusal, match="no server address"):
        Client(url)


def test_something_else_at_the_address_is_said() -> None:
    with serving(Behaviour()) as url, pytest.raises(ServerProblem, match="is this an SGLang server"):
        Client(url).get("/nothing")
    with pytest.raises(ServerProblem, match="not known"):
        ask_facts(Client("http://no-such-host.invalid:80"))


def test_background_requests_come_and_go() -> None:
    behaviour = Behaviour(interval_s=0.02)
    with serving(behaviour) as url:
        background = Background(Client(url), settings(), FAST_SIDE, True)
        background.resize(3)
        background.wait_busy()
        assert behaviour.active == 3
        background.resize(1)
        wait(lambda: behaviour.active == 1)
        background.resize(4)
        wait(lambda: behaviour.active == 4)
        background.resize(0)
        wait(lambda: behaviour.active == 0)
        assert all(body["sampling_params"]["ignore_eos"] for body in behaviour.bodies)


def test_a_batch_asks_all_prompts_at_once_on_each_side() -> None:
    behaviour = Behaviour(interval_s=0.02)
    with serving(behaviour) as url:
        pool = connected(url)
        run = BatchRun(settings(20), pool.endpoints(None), pool.occupancy, 4).start()
        run.join(30)
    assert run.problem == ""
    assert behaviour.most == 4
    assert run.tokens(PLAIN_SIDE) == run.tokens(FAST_SIDE) == 80
    assert run.shared == []
    assert run.throughput(FAST_SIDE) == pytest.approx(80 / run.seconds[FAST_SIDE])


def test_a_stopped_batch_quotes_nothing() -> None:
    behaviour = Behaviour(interval_s=0.02)
    with serving(behaviour) as url:
        pool = connected(url)
        run = BatchRun(settings(5000), pool.endpoints(None), pool.occupancy, 3).start()
        wait(lambda: run.tokens(PLAIN_SIDE) > 6)
        run.stop()
        assert wait(lambda: behaviour.active == 0) < 1.0
        run.join(10)
    assert run.finished
    assert run.throughput(PLAIN_SIDE) is None
