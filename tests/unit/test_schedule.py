"""Laws of core.schedule."""

from __future__ import annotations

import pytest

from sglang_ext.core.refusal import Refusal
from sglang_ext.core.schedule import Mode, ModePolicy, parse_mode


def test_thresholds() -> None:
    policy = ModePolicy(parallel_max_batch=2, plain_min_batch=8)
    chosen = [policy.choose(batch) for batch in range(1, 10)]
    assert chosen == [Mode.PARALLEL] * 2 + [Mode.SEQUENTIAL] * 5 + [Mode.PLAIN] * 2


def test_defaults_never_decode_plainly() -> None:
    assert ModePolicy().choose(1) is Mode.PARALLEL
    assert ModePolicy().choose(3) is Mode.SEQUENTIAL
    assert ModePolicy().choose(10_000) is Mode.SEQUENTIAL
    assert ModePolicy(parallel_max_batch=0).choose(1) is Mode.SEQUENTIAL


@pytest.mark.parametrize("mode", list(Mode))
def test_a_mode_by_name_holds_for_every_batch_and_a_forced_one_wins(mode: Mode) -> None:
    for batch in (1, 2, 3, 64):
        assert ModePolicy(mode=mode.value, plain_min_batch=3).choose(batch) is mode
        for name in ("auto", *[other.value for other in Mode]):
            assert ModePolicy(mode=name).choose(batch, forced=mode) is mode


def test_names() -> None:
    assert parse_mode("auto") is None
    assert parse_mode("sequential") is Mode.SEQUENTIAL
    with pytest.raises(Refusal, match="did you mean 'parallel'"):
        parse_mode("paralel")
    with pytest.raises(Refusal, match="did you mean 'plain'"):
        ModePolicy(mode="plian")


@pytest.mark.parametrize(
    ("parallel_max_batch", "plain_min_batch", "named"),
    [(-1, None, "parallel_max_batch=-1"), (2, 0, "plain_min_batch=0")],
)
def test_thresholds_out_of_range_are_refused(parallel_max_batch: int, plain_min_batch: int | None, named: str) -> None:
    with pytest.raises(Refusal, match=named):
        ModePolicy(parallel_max_batch=parallel_max_batch, plain_min_batch=plain_min_batch)
