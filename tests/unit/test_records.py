"""Step records survive the trip to the client and keep one element per token."""

from __future__ import annotations

import json

from sglang_ext.core.records import StepRecord, read_records


def record(accepted: int) -> StepRecord:
    return StepRecord("parallel", 3, (5, 6, 7), accepted, 9, 4, (0.9, 0.5, 0.1), 12.5, 2)


def test_round_trip_through_json() -> None:
    assert StepRecord.from_dict(json.loads(json.dumps(record(2).to_dict()))) == record(2)


def test_reading_a_response_skips_the_padding() -> None:
    elements = [record(2).to_dict(), None, None, record(0).to_dict()]
    assert read_records(elements) == [record(2), record(0)]
