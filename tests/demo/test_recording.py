"""A saved run comes back as it was, and anything else is refused in words."""

from __future__ import annotations

import json

import pytest

from demo.frames import final
from demo.recording import read_recording
from sglang_ext.core.refusal import Refusal
from tests.demo.recorded import recording


def test_a_run_survives_saving() -> None:
    run = recording()
    again = read_recording(run.to_json())
    assert again == read_recording(again.to_json())
    assert again.settings == run.settings
    assert again.verdict == run.verdict
    assert final(again) == final(run)
    assert {side: track.text for side, track in again.tracks.items()} == {
        side: track.text for side, track in run.tracks.items()
    }


def test_sampled_runs_keep_their_settings() -> None:
    run = recording(temperature=0.7, top_p=0.9, seed=4, mode="parallel", pruning="none", background=3)
    assert read_recording(run.to_json()).settings == run.settings


def edited(change: str) -> str:
    data = json.loads(recording().to_json())
    track = data["tracks"]["speculative"]
    if change == "version":
        data["version"] = 99
    elif change == "bonus":
        track["steps"][1]["record"]["bonus"] += 1
    elif change == "times":
        track["steps"][3]["at_s"] = -1.0
    elif change == "status":
        track["status"] = "perfect"
    elif change == "texts":
        track["steps"][2]["texts"].append("more")
    elif change == "settings":
        data["settings"]["temprature"] = 1
    elif change == "missing":
        del data["tracks"]["plain"]
    elif change == "drafts":
        next(s for s in track["steps"] if s["draft_texts"])["draft_texts"].pop()
    return json.dumps(data)


@pytest.mark.parametrize("change", ["version", "bonus", "times", "status", "texts", "settings", "missing", "drafts"])
def test_a_run_that_contradicts_itself_is_refused(change: str) -> None:
    with pytest.raises(Refusal, match="holds no saved run"):
        read_recording(edited(change))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": "other"}'])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(Refusal, match="saved by this page"):
        read_recording(text)
