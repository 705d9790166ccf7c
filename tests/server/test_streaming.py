"""Streaming: what arrives piece by piece is what arrives at once (law W1)."""

from __future__ import annotations

import re

import pytest

from sglang_ext.testing.laws import assert_identical, assert_stream
from sglang_ext.testing.prompts import PROMPTS, chat
from sglang_ext.testing.server import Request
from sglang_ext.testing.speculators import FEW, Answers, Speculator

LITERALS = (
    "你好，世界！今天天气很好。",
    "こんにちは、世界。ありがとう！",
    "🎉🚀 done ✅",
    "👨‍👩‍👧‍👦 family, 👩🏽‍💻 coder",
    "naïve café — “quoted” ½",
)
"""Texts whose characters take several tokens each; a grammar forces the model to write them."""

few = pytest.mark.parametrize("speculator", FEW, indirect=True)


@few
def test_streamed_text_is_the_whole_text(speculator: Speculator, reference: Answers) -> None:
    """Deltas concatenate to the answer; usage and finish reason are equal; a block may arrive as one chunk."""
    for prompt in (PROMPTS[6], PROMPTS[12], PROMPTS[26]):
        request = Request(prompt, {"max_new_tokens": 24})
        (expected,) = reference([request])
        chunks = list(speculator.server.stream(speculator.request(request, expected)))
        assert_stream(chunks, expected)
        assert_identical(expected, chunks[-1], speculator.name)


@few
@pytest.mark.parametrize("literal", LITERALS, ids=("Chinese", "Japanese", "emoji", "joined emoji", "accents"))
def test_characters_of_several_tokens(speculator: Speculator, reference: Answers, literal: str) -> None:
    """No chunk ends inside a character, wherever a block of drafts ends."""
    request = Request(chat("Say it."), {"max_new_tokens": 96, "regex": re.escape(literal)})
    (expected,) = reference([request])
    assert expected.text == literal
    chunks = list(speculator.server.stream(speculator.request(request, expected)))
    assert_stream(chunks, expected)
