"""The scripted drafters do what their names say."""

from __future__ import annotations

import math

import pytest

from sglang_ext.testing.scripts import SCRIPTS, draft

TRANSCRIPT = [11, 12, 13, 14, 15, 16]


def run(script: str, start: int = 1, width: int = 4) -> tuple[list[int], list[float]]:
    return draft(script, transcript=TRANSCRIPT, start=start, width=width, vocabulary=20, eos=2)


def test_oracle_replays_and_ends_with_eos() -> None:
    assert run("oracle")[0] == [12, 13, 14, 15]
    assert run("oracle", start=4)[0] == [15, 16, 2, 2]


def test_wrong_never_matches() -> None:
    assert all(token != truth for token, truth in zip(run("wrong")[0], run("oracle")[0], strict=True))


def test_half_is_right_then_wrong() -> None:
    tokens, truth = run("half")[0], run("oracle")[0]
    assert tokens[:2] == truth[:2]
    assert all(token != right for token, right in zip(tokens[2:], truth[2:], strict=True))


def test_broken_scripts_are_broken() -> None:
    assert all(token < 0 or token >= 20 for token in run("bad")[0])
    assert all(math.isnan(value) for value in run("nan")[1])
    assert set(run("eos")[0]) == {2}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_fills_the_block(script: str) -> None:
    tokens, confidence = run(script)
    assert len(tokens) == len(confidence) == 4
    assert run(script)[0] == tokens


def test_unknown_script() -> None:
    with pytest.raises(ValueError, match="allowed: oracle"):
        run("orcale")
