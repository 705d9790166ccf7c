"""Records and tokens merge into steps whose kinds add up, or the disagreement is said."""

from __future__ import annotations

import random

import pytest

from demo.steps import ACCEPTED, BONUS, PLAIN, RecordsDisagree, Step, merge
from sglang_ext.core.records import StepRecord
from tests.demo.recorded import answer, record, step, word


def elements(told: list[StepRecord], lengths: list[int]) -> list[dict | None]:
    """Return the server's list: each record, then nulls for the rest of its tokens."""
    found: list[dict | None] = []
    for one, length in zip(told, lengths, strict=True):
        found += [one.to_dict(), *[None] * (length - 1)]
    return found


def test_one_chunk_with_several_steps() -> None:
    told = [record("prefill", (), 0, 5), record("parallel", (6, 7, 9), 2, 8), record("plain", (), 0, 11)]
    ids = [5, 6, 7, 8, 11]
    steps = merge(1.5, ids, [word(token) for token in ids], elements(told, [1, 3, 1]))
    assert [step.ids for step in steps] == [(5,), (6, 7, 8), (11,)]
    assert [step.kinds for step in steps] == [(PLAIN,), (ACCEPTED, ACCEPTED, BONUS), (PLAIN,)]
    assert [step.rejected for step in steps] == [(), (2,), ()]
    assert {step.at_s for step in steps} == {1.5}


def test_a_block_cut_by_a_limit_keeps_only_accepted_drafts() -> None:
    told = record("sequential", (6, 7, 9), 3, 8)
    (cut,) = merge(0.0, [6, 7], ["a", "b"], elements([told], [2]))
    assert cut.kinds == (ACCEPTED, ACCEPTED)
    assert cut.rejected == ()


def test_a_speculative_step_that_verified_nothing_has_a_bonus_token() -> None:
    assert step(0.0, record("parallel", (), 0, 4)).kinds == (BONUS,)
    assert step(0.0, record("plain", (3, 4), 1, 4)).kinds == (ACCEPTED, BONUS)


def test_without_telemetry_a_chunk_is_one_plain_step() -> None:
    for absent in ([], [None, None]):
        (only,) = merge(0.5, [1, 2], ["a", "b"], absent)
        assert only == Step(0.5, (1, 2), ("a", "b"))
        assert only.kinds == (PLAIN, PLAIN)
        assert only.mode == "unknown"
    assert merge(0.5, [], [], []) == []


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ([6, 7, 8], [record("parallel", (6, 9), 2, 8).to_dict(), None, None]),
        ([6, 8], [record("parallel", (6, 9), 1, 7).to_dict(), None]),
        ([6], [record("parallel", (6, 9), 1, 7).to_dict(), None]),
        ([6, 8], [None, record("plain", (), 0, 8).to_dict()]),
        ([8], [{**record("parallel", (6,), 0, 8).to_dict(), "verify_length": 2}]),
        ([6, 7, 8], [record("parallel", (6,), 1, 7).to_dict(), None, None]),
    ],
    ids=("wrong draft", "wrong bonus", "wrong number", "no first record", "wrong verify length", "too many tokens"),
)
def test_records_that_do_not_spell_the_tokens_are_refused(ids: list[int], told: list) -> None:
    with pytest.raises(RecordsDisagree):
        merge(0.0, ids, [""] * len(ids), told)


def test_any_cut_into_chunks_gives_the_same_steps() -> None:
    seed = random.randrange(10_000)
    print(f"seed {seed}")
    rng, whole = random.Random(seed), answer(200, 50.0, True, seed)
    chunks, rest = [], list(whole)
    while rest:
        size = rng.randrange(1, 5)
        taken, rest = rest[:size], rest[size:]
        ids = [token for one in taken for token in one.ids]
        told = elements([one.record for one in taken], [len(one.ids) for one in taken])
        chunks += merge(0.0, ids, [word(token) for token in ids], told)
    assert [(one.ids, one.texts, one.record) for one in chunks] == [(one.ids, one.texts, one.record) for one in whole]
