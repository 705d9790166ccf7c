"""Answers made up step by step, so that every count is known beforehand."""

from __future__ import annotations

import random
from collections.abc import Sequence

from demo.facts import Facts
from demo.identity import compare
from demo.recording import Recording
from demo.settings import FAST_SIDE, PLAIN_SIDE, Settings
from demo.steps import Step
from demo.tracks import DONE, Track
from sglang_ext.core.records import StepRecord

WORDS = ("the ", "sea ", "is ", "wide", ",\n", "blue ", "<b>", "&amp; ", "世", "界 ", "🙂 ", '"x" ')


def record(
    mode: str, drafts: Sequence[int], accepted: int, bonus: int, step_ms: float = 20.0, batch: int = 1
) -> StepRecord:
    """Return a record with falling confidences."""
    confidence = tuple(round(0.9 - 0.1 * slot, 4) for slot in range(len(drafts)))
    groups = len(drafts) + 1 if mode == "parallel" else 0
    return StepRecord(mode, len(drafts), tuple(drafts), accepted, bonus, groups, confidence, step_ms, batch)


def step(at_s: float, told: StepRecord, keep: int | None = None) -> Step:
    """Return the step a record spells, cut after ``keep`` tokens."""
    ids = (*told.draft_ids[: told.accepted], told.bonus)[:keep]
    return Step(at_s, ids, tuple(map(word, ids)), told, tuple(map(word, told.draft_ids)))


def word(token: int) -> str:
    """Return a token's text."""
    return WORDS[token % len(WORDS)]


def answer(tokens: int, rate: float, speculative: bool, seed: int) -> list[Step]:
    """Return an answer of exactly ``tokens`` tokens that arrives at ``rate`` tokens a second on average."""
    rng = random.Random(seed)
    ids = [rng.randrange(1000) for _ in range(tokens)]
    steps = [step(0.1, record("prefill", (), 0, ids[0], 80.0))]
    done = 1
    while done < tokens:
        accepted = rng.choice((0, 0, 1, 2, 4)) if speculative else 0
        accepted = min(accepted, tokens - done - 1)
        wrong = [ids[done + accepted] + 1, 7, 7][: rng.randrange(4)] if speculative else []
        drafts = [*ids[done : done + accepted], *wrong]
        mode = rng.choice(("parallel", "sequential")) if speculative else "plain"
        done += accepted + 1
        steps.append(step(0.1 + (done - 1) / rate, record(mode, drafts, accepted, ids[done - 1])))
    return steps


def recording(tokens: int = 60, rate: float = 30.0, seed: int = 3, **settings: object) -> Recording:
    """Return a run whose two answers are equal."""
    asked = Settings((("user", "Hello?"),), max_new_tokens=tokens, **settings)  # type: ignore[arg-type]
    facts = Facts("http://127.0.0.1:1", "target", "FLEXDRAFT", 8, "auto", "none", 0.01, True, False, "float32", "cpu")
    plain = Track(PLAIN_SIDE, answer(tokens, rate / 2, False, seed), DONE, "", 20, 19, "length")
    fast = Track(FAST_SIDE, answer(tokens, rate, True, seed), DONE, "", 20, 19, "length")
    verdict = compare(asked, plain, fast)
    return Recording(
        asked, {PLAIN_SIDE: facts, FAST_SIDE: facts}, {PLAIN_SIDE: plain, FAST_SIDE: fast}, verdict, "2026-01-01"
    )
