"""Requests that would end the scheduler are answered with 400 instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.serving.request_hooks import check_request
from sglang_ext.testing.scripts import TRANSCRIPT_KEY


def request(custom_params: Any = None, input_embeds: Any = None) -> SimpleNamespace:
    return SimpleNamespace(sampling_params={"custom_params": custom_params}, input_embeds=input_embeds)


@pytest.mark.parametrize("input_ids", ([], None))
def test_a_prompt_without_tokens_is_refused(input_ids: list[int] | None) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        check_request(request(), input_ids, scripted=False)


@pytest.mark.parametrize("custom", ([], "plain", 5, {"speculative": 5}, {"speculative": {"script": "oracle"}}))
def test_bad_custom_params_are_refused(custom: object) -> None:
    with pytest.raises(ValueError, match="custom_params"):
        check_request(request(custom), [1], scripted=False)


def test_scripts_are_known_by_name() -> None:
    check_request(request({"speculative": {"script": "oracle"}}), [1], scripted=True)
    with pytest.raises(ValueError, match="allowed: "):
        check_request(request({"speculative": {"script": "orakel"}}), [1], scripted=True)


@pytest.mark.parametrize("transcript", (5, "x", ["a"], [-1], [2**70], {"a": 1}))
def test_transcripts_are_token_ids(transcript: object) -> None:
    check_request(request({TRANSCRIPT_KEY: transcript}), [1], scripted=False)
    with pytest.raises(ValueError, match="no list of token ids"):
        check_request(request({TRANSCRIPT_KEY: transcript}), [1], scripted=True)


def test_sound_requests_pass() -> None:
    check_request(request(), [1], scripted=False)
    check_request(request({"speculative": {"mode": "plain"}, "other": [1]}), [1], scripted=False)
    check_request(request(input_embeds=[[0.0]]), None, scripted=False)
