"""Grammars hold at every position of a block, and log-probabilities are those of the target."""

from __future__ import annotations

import json
import re

import pytest

from sglang_ext.testing.laws import assert_identical
from sglang_ext.testing.mismatch import TOLERANCE, forced_logprobs
from sglang_ext.testing.prompts import chat, requests
from sglang_ext.testing.server import Reply, Request, Server
from sglang_ext.testing.speculators import FEW, Answers, Speculator

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z ]{1,12}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PATTERN = r"(yes|no), because [a-z ]{5,30}\."

GRAMMARS: dict[str, Request] = {
    "json_schema": Request(chat("Describe Bob, who is 44."), {"max_new_tokens": 60, "json_schema": json.dumps(SCHEMA)}),
    "regex": Request(chat("Is the sea salty?"), {"max_new_tokens": 60, "regex": PATTERN}),
}


def assert_valid(kind: str, reply: Reply) -> None:
    """Hold one constrained answer to its grammar, with nothing behind it."""
    if reply.finish["type"] == "length":
        return
    if kind == "regex":
        assert re.fullmatch(PATTERN, reply.text), reply.text
        return
    value = json.loads(reply.text)
    assert set(value) == {"name", "age"} and isinstance(value["age"], int), value


@pytest.mark.parametrize("kind", GRAMMARS)
def test_grammars_at_temperature_zero(speculator: Speculator, reference: Answers, kind: str) -> None:
    """Law G1 for every script and mode: valid and equal to plain, also beside unconstrained requests."""
    asked = [GRAMMARS[kind], *requests(3)]
    expected = reference(asked)
    assert expected[0].finish["type"] == "stop", "the plain answer must reach the grammar's end"
    for left, right in zip(expected, speculator.ask(asked), strict=True):
        assert_identical(left, right, f"{speculator.name} {kind}")
    assert_valid(kind, expected[0])


@pytest.mark.parametrize("speculator", FEW, indirect=True)
@pytest.mark.parametrize("kind", GRAMMARS)
def test_grammars_at_temperature_one(speculator: Speculator, reference: Answers, kind: str) -> None:
    """Law G1 when sampling: always valid."""
    request = GRAMMARS[kind]
    (expected,) = reference([request])
    warm = speculator.request(Request(request.prompt, {**request.sampling, "temperature": 1.0}), expected)
    for reply in speculator.server.generate_all([warm] * 6):
        assert_valid(kind, reply)
    assert speculator.server.healthy()


def test_malformed_grammar_gets_400(plain: Server, flexdraft: Server) -> None:
    """Law G3: a grammar that is none is the client's error, as on the plain server."""
    body = Request(chat("Hi"), {"regex": "(unclosed"}).body()
    codes = [server.post("/generate", body).status_code for server in (plain, flexdraft)]
    assert codes == [400, 400]
    assert flexdraft.healthy()


@pytest.mark.parametrize("speculator", FEW, indirect=True)
def test_logprobs_equal_rescoring(speculator: Speculator, plain: Server) -> None:
    """Law G4: log-probabilities of the output equal those read by prefill, one per token; so do the best ones."""
    for request in requests(4, tokens=16):
        asked = Request(request.prompt, request.sampling, {"return_logprob": True, "top_logprobs_num": 3})
        (reply,) = speculator.ask([asked])
        rows = reply.meta["output_token_logprobs"]
        assert [row[1] for row in rows] == reply.ids
        assert len(reply.meta["output_top_logprobs"]) == len(rows) == reply.completion_tokens
        scored = forced_logprobs(plain, plain.tokenize(str(request.prompt)), reply.ids)
        for row, best, expected in zip(rows, reply.meta["output_top_logprobs"], scored, strict=True):
            assert abs(row[0] - expected) < TOLERANCE["float32"], (row, expected)
            assert abs(best[0][0] - row[0]) < TOLERANCE["float32"], "a greedy token has the best log-probability"
            assert best[0][0] >= best[1][0] >= best[2][0]


@pytest.mark.parametrize("speculator", ("oracle", "parallel"), indirect=True)
def test_logprobs_in_streams(speculator: Speculator) -> None:
    """Law G4 in streams: the chunks together carry one log-probability per token."""
    (request,) = requests(1, tokens=16)
    asked = Request(request.prompt, request.sampling, {"return_logprob": True})
    (expected,) = speculator.reference([asked])
    chunks = list(speculator.server.stream(speculator.request(asked, expected)))
    rows = chunks[-1].meta["output_token_logprobs"]
    assert [row[1] for row in rows] == expected.ids
    for row, other in zip(rows, expected.meta["output_token_logprobs"], strict=True):
        assert abs(row[0] - other[0]) < TOLERANCE["float32"]
