"""Requests that would end the scheduler are answered with 400 instead."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.serving.request_hooks import check_embeds, check_logprobs, check_options, check_prompt
from sglang_ext.testing.scripts import TRANSCRIPT_KEY


@pytest.mark.parametrize("input_ids", ([], None))
def test_a_prompt_without_tokens_is_refused(input_ids: list[int] | None) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        check_prompt(input_ids, 10)


@pytest.mark.parametrize("bad", (-1, -(2**40), 10, 2**40))
def test_tokens_the_target_does_not_have_are_refused(bad: int) -> None:
    for place in range(3):
        prompt = [0, 9]
        prompt.insert(place, bad)
        with pytest.raises(ValueError, match=f"token id {bad}; ids from 0 to 9"):
            check_prompt(prompt, 10)
    check_prompt([0, 9], 10)


@pytest.mark.parametrize("rows", ([], [[1.0]], [[1.0, 2.0], [1.0]], [[1.0, "x"]], "ab", [5], [None]))
def test_embeddings_of_another_form_are_refused(rows: object) -> None:
    with pytest.raises(ValueError, match="list of 2 numbers"):
        check_embeds(rows, 2, torch.bfloat16)


def test_embeddings_need_the_type_the_host_gives_them() -> None:
    check_embeds([[1.0, 2]], 2, torch.bfloat16)
    with pytest.raises(ValueError, match="--dtype bfloat16"):
        check_embeds([[1.0, 2]], 2, torch.float32)


@pytest.mark.parametrize("count", (-1, 11, 10**9))
def test_more_logprobs_than_tokens_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"top_logprobs_num is {count}; 0 to 10"):
        check_logprobs(count, 10)
    for fine in (None, 0, 10):
        check_logprobs(fine, 10)


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


@pytest.mark.parametrize("patterns", ("w[(", ["a", "(("], [5], "a{99999999999}"))
def test_stop_patterns_that_are_none_are_refused(patterns: object) -> None:
    with pytest.raises(ValueError, match="no regular expression"):
        check_options({"stop_regex": patterns}, scripted=False)


@pytest.mark.parametrize("params", (None, [{}], "greedy"))
def test_sampling_parameters_are_one_object(params: object) -> None:
    with pytest.raises(ValueError, match="sampling_params is a"):
        check_options(params, scripted=False)


def test_sound_requests_pass() -> None:
    for params in (
        {},
        {"custom_params": None},
        {"stop_regex": ["a+", "b"]},
        {"stop_regex": None},
        {"custom_params": {"speculative": {"mode": "plain"}, "x": [1]}},
    ):
        check_options(params, scripted=False)
