"""What the controls say reaches the server, and nothing else does."""

from __future__ import annotations

import json
import shlex

import pytest

from demo.controls import BadInput, Controls
from demo.settings import FAST_SIDE, PLAIN_SIDE, Settings

CONTROLS = Controls("Hi?", "", False, 0, 1.0, 64, "", None, "auto", "as the server", 0.1, 0, "turns")


def controls(**changes: object) -> Controls:
    return Controls(**{**vars(CONTROLS), **changes})


def test_auto_leaves_the_mode_to_the_server() -> None:
    settings = CONTROLS.settings((), True)
    assert settings.overrides(FAST_SIDE) == {}
    assert settings.overrides(PLAIN_SIDE) == {"mode": "plain"}
    assert settings.sampling(FAST_SIDE, True) == {
        "temperature": 0.0,
        "max_new_tokens": 64,
        "custom_params": {"speculative": {"records": True}},
    }


def test_a_server_without_telemetry_gets_stock_fields_only() -> None:
    assert "custom_params" not in CONTROLS.settings((), True).sampling(PLAIN_SIDE, False)


def test_pruning_goes_only_where_it_is_understood() -> None:
    asked = controls(pruning="min_confidence", prune_threshold=0.3)
    assert asked.settings((), True).overrides(FAST_SIDE) == {"pruning": "min_confidence", "prune_threshold": 0.3}
    assert asked.settings((), False).overrides(FAST_SIDE) == {}
    assert controls(pruning="none").settings((), True).overrides(FAST_SIDE) == {"pruning": "none"}


def test_seed_and_top_p_go_with_temperature() -> None:
    sampled = controls(temperature=0.8, top_p=0.9, seed="5").settings((), True).sampling(FAST_SIDE, True)
    assert (sampled["temperature"], sampled["top_p"], sampled["sampling_seed"]) == (0.8, 0.9, 5)
    assert "sampling_seed" not in controls(seed="5").settings((), True).sampling(FAST_SIDE, True)


def test_a_follow_up_sends_role_and_content_only() -> None:
    """Law D3."""
    before = (("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"))
    chat = controls(follow_up=True, system="ignored now").settings(before, True).chat()
    assert [message["content"] for message in chat] == ["Be brief.", "Hi", "Hello!", "Hi?"]
    assert all(set(message) == {"role", "content"} for message in chat)
    assert all(isinstance(value, str) for message in chat for value in message.values())
    assert controls(system="Be kind.").settings(before, True).chat()[0] == {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    "change", [{"prompt": "  "}, {"max_tokens": 0}, {"max_tokens": 10**6}, {"mode": "warp"}, {"seed": "x"}]
)
def test_what_cannot_be_asked_is_said(change: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        controls(**change).settings((), True)


def test_curl_quotes_anything() -> None:
    prompt = 'It\'s "$HOME" `date`\n\\ <&> 世界'
    command = Settings((("user", prompt),), mode="parallel").curl("http://127.0.0.1:30000")
    words = shlex.split(command)
    body = json.loads(words[words.index("-d") + 1])
    assert body["messages"][0]["content"] == prompt
    assert body["custom_params"] == {"speculative": {"mode": "parallel"}}
