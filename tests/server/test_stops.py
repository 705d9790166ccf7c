"""Stops, limits and usage: an output ends where the plain one ends, wherever that falls inside a block of drafts."""

from __future__ import annotations

import pytest

from sglang_ext.testing.laws import assert_identical, assert_same
from sglang_ext.testing.prompts import LONG_TEXT, PROMPTS, chat, requests
from sglang_ext.testing.server import Request, Server
from sglang_ext.testing.speculators import FEW, Answers, Speculator

few = pytest.mark.parametrize("speculator", FEW, indirect=True)


def _pieces(plain: Server, ids: list[int]) -> list[str]:
    """Return the text each token adds, from the plain server's own detokeniser."""
    prefixes = [{"model": "default", "tokens": ids[: i + 1]} for i in range(len(ids))]
    texts = [plain.post("/detokenize", body).json()["text"] for body in prefixes]
    return [text[len(before) :] for before, text in zip(["", *texts], texts, strict=False)]


@few
def test_stop_string_around_the_length_cap(speculator: Speculator, plain: Server, reference: Answers) -> None:
    """Law T1: text, finish reason, matched stop and token count equal plain, with stop and cap next to each other."""
    prompt = PROMPTS[20]
    (whole,) = reference([Request(prompt, {"max_new_tokens": 24})])
    pieces = _pieces(plain, whole.ids)
    asked = []
    for place in (2, 5, 8, 13):
        stop = pieces[place] + pieces[place + 1][:1]  # a stop string that straddles two tokens
        asked += [Request(prompt, {"max_new_tokens": cap, "stop": [stop]}) for cap in range(place, place + 4)]
    for request, expected, got in zip(asked, reference(asked), speculator.ask(asked), strict=True):
        assert_identical(expected, got, f"{speculator.name} {dict(request.sampling)}")
    assert {reply.finish["type"] for reply in reference(asked)} == {"stop", "length"}, "the test must meet both ends"


@few
def test_nothing_after_a_stop_token(speculator: Speculator, reference: Answers) -> None:
    """Law T2: a stop id at every offset inside a block ends the output right there."""
    prompt = PROMPTS[28]
    (whole,) = reference([Request(prompt, {"max_new_tokens": 24})])
    first = {token: i for i, token in reversed(list(enumerate(whole.ids)))}
    places = sorted(first.values())
    asked = [Request(prompt, {"max_new_tokens": 24, "stop_token_ids": [whole.ids[place]]}) for place in places]
    assert len(asked) >= speculator.block_size, "the transcript repeats itself too much for this law"
    got = speculator.ask(asked)
    for place, expected, reply in zip(places, reference(asked), got, strict=True):
        assert_identical(expected, reply, f"{speculator.name} stop at {place}")
        assert len(reply.ids) == place + 1, (place, reply.ids)


def test_nothing_after_end_of_sequence(speculator: Speculator, reference: Answers) -> None:
    """Law T2 for the target's own end: short answers end with it, and nothing follows."""
    questions = ("Answer with one word: yes or no?", "Say OK and nothing else.", "Say only the word blue.", "Hi")
    asked = [Request(chat(question), {"max_new_tokens": 60}) for question in questions]
    expected = reference(asked)
    assert any(reply.finish["type"] == "stop" for reply in expected), "no answer ends by itself: choose other prompts"
    assert_same(speculator.plain, asked, expected, speculator.hold(asked), speculator.name)


@pytest.mark.parametrize("speculator", (*FEW, "eos"), indirect=True)
def test_exact_token_counts(speculator: Speculator, reference: Answers) -> None:
    """Law T3: completion_tokens is max_new_tokens, 1 to 2B + 1, even if end-of-sequence is to be ignored."""
    counts = range(1, 2 * speculator.block_size + 2)
    asked = [Request(chat("Say OK."), {"max_new_tokens": count, "ignore_eos": True}) for count in counts]
    replies = speculator.ask(asked)
    assert [reply.completion_tokens for reply in replies] == list(counts)
    assert_same(speculator.plain, asked, reference(asked), replies, speculator.name)


def test_minimum_token_counts(speculator: Speculator, reference: Answers) -> None:
    """Law S3: min_new_tokens counts tokens, not steps; the text equals plain."""
    prompt = chat("Say OK and nothing else.")
    asked = [Request(prompt, {"max_new_tokens": 24, "min_new_tokens": least}) for least in (1, 5, 9, 10, 18)]
    replies = speculator.ask(asked)
    assert all(r.completion_tokens >= a.sampling["min_new_tokens"] for r, a in zip(replies, asked, strict=True))
    for expected, got in zip(reference(asked), replies, strict=True):
        assert_identical(expected, got, speculator.name)


@few
def test_prompts_near_the_context_limit(speculator: Speculator, plain: Server) -> None:
    """Law T4: prompts of context - j tokens, j = 0..B+1: refused or cut as plain does, then healthy and equal again."""
    limit = int(plain.get("/server_info")["context_length"])
    ids = (plain.tokenize(LONG_TEXT) * 4)[:limit]
    (transcript,) = speculator.reference([Request(ids[: limit - speculator.block_size - 1], {"max_new_tokens": 4})])
    for short in range(speculator.block_size + 2):
        request = Request(ids[: limit - short], {"max_new_tokens": 64})
        drafted = speculator.request(request, transcript)
        expected, got = (s.post("/generate", r.body()) for s, r in ((plain, request), (speculator.server, drafted)))
        assert got.status_code == expected.status_code, (short, expected.text[:300], got.text[:300])
        if expected.status_code == 200:
            left, right = expected.json(), got.json()
            assert right["output_ids"] == left["output_ids"], short
            assert right["meta_info"]["finish_reason"] == left["meta_info"]["finish_reason"], short
    speculator.hold(requests(2, tokens=8))
