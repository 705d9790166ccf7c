"""A whole comparison against local servers: who is asked what, when, and what stays paused."""

from __future__ import annotations

from typing import Any

from sglang_ext.bench.client import Client, Sampling
from sglang_ext.bench.datasets import Prompt
from sglang_ext.bench.interleave import Size
from sglang_ext.bench.runner import OVERRIDE, PLAIN, PLAIN_PARAMS, Arm, Switch, run
from tests.bench.fake_server import FakeServer, serving

SPECULATIVE = "flexdraft"


def echo(body: dict[str, Any]) -> dict[str, Any]:
    ids = list(range(body["sampling_params"]["max_new_tokens"]))
    return {"output_ids": ids, "text": "x" * len(ids), "meta_info": {"completion_tokens": len(ids)}}


class Process:
    """Stands in for a server process: remembers whether it is paused."""

    def __init__(self) -> None:
        self.paused = False

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


def test_only_the_server_under_measurement_runs() -> None:
    fast, plain = Process(), Process()
    client = Client("http://127.0.0.1:1")
    arms = [
        Arm(SPECULATIVE, client, Sampling(1), fast),  # type: ignore[arg-type]
        Arm(OVERRIDE, client, Sampling(1), fast),  # type: ignore[arg-type]
        Arm(PLAIN, client, Sampling(1), plain),  # type: ignore[arg-type]
    ]
    switch = Switch(arms)
    for arm in arms:
        switch.only(arm)
        assert (fast.paused, plain.paused) == (arm.name == PLAIN, arm.name != PLAIN)
    switch.all()
    assert not fast.paused and not plain.paused


def test_every_round_is_answered_by_every_arm_from_an_empty_cache() -> None:
    prompts = {"d": [Prompt("d", f"d/{number}", "q", (number, 7, 7)) for number in range(6)]}
    size = Size((1, 2), prompts=3, minimum_rounds=2)
    with serving(FakeServer(echo)) as one, serving(FakeServer(echo)) as two:
        arms = [
            Arm(SPECULATIVE, Client(one.url), Sampling(9)),
            Arm(OVERRIDE, Client(one.url), Sampling(9, custom_params=PLAIN_PARAMS)),
            Arm(PLAIN, Client(two.url), Sampling(9)),
        ]
        measurements = run(arms, prompts, size)
    assert len(measurements) == 3 * (3 + 2)
    by_key: dict[Any, set[str]] = {}
    for item in measurements:
        by_key.setdefault(item.key, set()).add(item.block.arm)
        assert all(completion.tokens == 9 for completion in item.completions)
    assert all(names == {SPECULATIVE, OVERRIDE, PLAIN} for names in by_key.values())
    # Each block, and each warm-up (one per arm and batch size), starts with an empty prefix cache.
    assert one.flushes + two.flushes == len(measurements) + 2 * 3
    timed = [body for body in one.bodies if body["sampling_params"]["max_new_tokens"] == 9]
    plain = [body for body in timed if body["sampling_params"].get("custom_params") == PLAIN_PARAMS]
    assert len(timed) == 2 * len(plain) == 2 * (3 + 2 * 2)
