"""A run as a JSON file: saved after a run, replayed later without a server."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from demo.facts import Facts
from demo.identity import Verdict
from demo.settings import SIDES, Settings
from demo.steps import Step, check
from demo.tracks import STATUSES, Track
from sglang_ext.core.records import StepRecord
from sglang_ext.core.refusal import Refusal, refuse_unknown

FORMAT = "sglang-flexdraft-demo-run"
VERSION = 1
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Recording:
    """Everything the page shows of a run.

    Attributes:
        settings: what was asked.
        servers: the server behind each side.
        tracks: each side's answer.
        verdict: whether the answers are equal.
        created: date and time of the run, ISO 8601.
    """

    settings: Settings
    servers: dict[str, Facts]
    tracks: dict[str, Track]
    verdict: Verdict
    created: str

    def to_json(self) -> str:
        """Return the file's text."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "created": self.created,
            "settings": dataclasses.asdict(self.settings),
            "servers": {side: dataclasses.asdict(facts) for side, facts in self.servers.items()},
            "verdict": dataclasses.asdict(self.verdict),
            "tracks": {side: _track_to_dict(track) for side, track in self.tracks.items()},
        }
        return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def read_recording(text: str) -> Recording:
    """Read what :meth:`Recording.to_json` wrote.

    Raises:
        Refusal: it is something else, or its records do not spell its tokens.
    """
    if len(text) > MOST_BYTES:
        raise _refusal(f"it has {len(text):,} characters")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise _refusal(f"it is not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise _refusal(f'it does not say "format": "{FORMAT}", "version": {VERSION}')
    try:
        settings = dict(data["settings"])
        settings["messages"] = tuple((str(role), str(content)) for role, content in settings["messages"])
        refuse_unknown("settings", settings, [entry.name for entry in dataclasses.fields(Settings)])
        return Recording(
            settings=Settings(**settings),
            servers={side: Facts(**data["servers"][side]) for side in SIDES if side in data["servers"]},
            tracks={side: _track_from_dict(side, data["tracks"][side]) for side in SIDES},
            verdict=Verdict(**data["verdict"]),
            created=str(data["created"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _refusal(str(error)) from error


def _track_to_dict(track: Track) -> dict[str, Any]:
    document = {entry.name: vars(track)[entry.name] for entry in dataclasses.fields(track)}
    document["steps"] = [
        {
            "at_s": round(step.at_s, 6),
            "ids": list(step.ids),
            "texts": list(step.texts),
            "record": None if step.record is None else step.record.to_dict(),
            "draft_texts": list(step.draft_texts),
        }
        for step in track.steps
    ]
    return document


def _track_from_dict(side: str, data: dict[str, Any]) -> Track:
    steps = [_step_from_dict(step) for step in data["steps"]]
    times = [step.at_s for step in steps]
    if times != sorted(times) or (times and times[0] < 0):
        raise ValueError(f"steps of {side} are not in order of time")
    track = Track(**{**data, "steps": steps})
    if track.status not in STATUSES or track.side != side:
        raise ValueError(f"track {side} has side {track.side!r} and status {track.status!r}")
    return track


def _step_from_dict(data: dict[str, Any]) -> Step:
    record = None if data["record"] is None else StepRecord.from_dict(data["record"])
    ids = tuple(int(token) for token in data["ids"])
    texts = tuple(str(text) for text in data["texts"])
    drafts = tuple(str(text) for text in data["draft_texts"])
    if len(ids) != len(texts) or (record is not None and len(drafts) != record.verify_length):
        raise ValueError("a step's tokens and texts differ in number")
    step = Step(float(data["at_s"]), ids, texts, record, drafts)
    check(step)
    return step


def _refusal(reason: str) -> Refusal:
    return Refusal(f"this file holds no saved run: {reason}", "a JSON file saved by this page is allowed", "choose one")
