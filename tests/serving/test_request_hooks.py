"""Requests that would end the scheduler are answered with 400 instead."""

from __future__ import annotations

import pytest

from sglang_ext.serving.request_hooks import check_options, check_prompt
from sglang_ext.testing.scripts import TRANSCRIPT_KEY


@pytest.mark.parametrize("input_ids", ([], None))
def test_a_prompt_without_tokens_is_refused(input_ids: list[int] | None) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        check_prompt(input_ids, False, 10)
    check_prompt(input_ids, True, 10)


@pytest.mark.parametrize("bad", (-1, -(2**40), 10, 2**40))
def test_tokens_the_target_does_not_have_are_refused(bad: int) -> None:
    for place in range(3):
        prompt = [0, 9]
        prompt.insert(place, bad)
        with pytest.raises(ValueError, match=f"token id {bad}; ids from 0 to 9"):
            check_prompt(prompt, False, 10)
    check_prompt([0, 9], False, 10)


@pytest.mark.parametrize("custom", ([], "plain", 5, {"speculative": 5}, {"speculative": {"script": "oracle"}}))
def test_bad_custom_params_are_refused(custom: object) -> None:
    with pytest.raises(ValueError, match="custom_params"):
        check_options({"custom_params": custom}, scripted=False)


def test_scripts_are_known_by_name() -> None:
    check_options({"custom_params": {"speculative": {"script": "oracle"}}}, scripted=True)
    with pytest.raises(ValueError, match="allowed: "):
        check_options({"custom_params": {"speculative": {"script": "orakel"}}}, scripted=True)


@pytest.mark.parametrize("transcript", (5, "x", ["a"], [-1], [2**70], {"a": 1}))
def test_transcripts_are_token_ids(transcript: object) -> None:
    given = {"custom_params": {TRANSCRIPT_KEY: transcript}}
    check_options(given, scripted=False)
    with pytest.raises(ValueError, match="no list of token ids"):
        check_options(given, scripted=True)


def test_sound_requests_pass() -> None:
    for params in (None, {}, {"custom_params": None}, {"custom_params": {"speculative": {"mode": "plain"}, "x": [1]}}):
        check_options(params, scripted=False)
