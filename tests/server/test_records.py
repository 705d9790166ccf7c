"""Telemetry and per-request overrides: what a client can learn about each step, and what it can ask for."""

from __future__ import annotations

import pytest

from sglang_ext.core.records import StepRecord
from sglang_ext.testing.laws import RECORDS_KEY, assert_identities, assert_records, assert_same
from sglang_ext.testing.prompts import PROMPTS, requests
from sglang_ext.testing.server import Reply, Request, Server
from sglang_ext.testing.speculators import FEW, Answers, Speculator, block_size


@pytest.mark.parametrize("speculator", (*FEW, "noise", "eos"), indirect=True)
def test_records_line_up_with_tokens(speculator: Speculator) -> None:
    """One element per token; drafts, accepted counts and bonus tokens spell the output; sums equal the counters."""
    asked = requests(12)
    replies = speculator.ask(asked, records=True)
    assert_same(speculator.plain, asked, speculator.reference(asked), replies, speculator.name)
    for reply in replies:
        assert_identities(reply, speculator.block_size)
        records = assert_records(reply, speculator.block_size)
        if speculator.name in ("parallel", "sequential"):
            assert {record.mode for record in records[1:]} == {speculator.name}
        if speculator.name == "sequential":
            assert all(record.groups == 0 for record in records)


def test_no_records_unless_asked(scripted: Server, flexdraft: Server) -> None:
    """Telemetry is absent when nobody asked; beside a neighbour that did, the host pads with nulls, never records."""
    asked = requests(6)
    for server in (scripted, flexdraft):
        assert all(RECORDS_KEY not in reply.meta for reply in server.generate_all(asked))
        mixed = [r.speculative({"records": True}) if i % 2 else r for i, r in enumerate(asked)]
        for i, reply in enumerate(server.generate_all(mixed)):
            assert any(reply.meta.get(RECORDS_KEY, [])) == bool(i % 2)


def test_records_in_streams(flexdraft: Server) -> None:
    """A stream carries the records of the tokens sent so far."""
    request = Request(PROMPTS[6], {"max_new_tokens": 20}).speculative({"records": True})
    chunks = list(flexdraft.stream(request))
    for chunk in chunks:
        assert len(chunk.meta[RECORDS_KEY]) == chunk.completion_tokens
    assert_records(chunks[-1], block_size(flexdraft))
    assert len(chunks) > 1


def test_plain_by_request(flexdraft: Server, plain: Server, reference: Answers) -> None:
    """One server answers one request plainly and the next one speculatively, in the same batch."""
    asked = requests(8)
    mixed = [
        request.speculative({"mode": "plain" if i % 2 else "sequential", "records": True})
        for i, request in enumerate(asked)
    ]
    replies = flexdraft.generate_all(mixed)
    assert_same(plain, asked, reference(asked), replies, "plain by request")
    for i, reply in enumerate(replies):
        records = assert_records(reply, block_size(flexdraft))
        if i % 2:
            assert all(record.verify_length == 0 and record.groups == 0 for record in records)
            assert len(records) == reply.completion_tokens, "plain decoding commits one token per step"


def test_parallel_and_sequential_propose_the_same(flexdraft: Server) -> None:
    """In fp32 both modes verify the same drafts at every step (FlexDraft section 4)."""
    asked = requests(12, tokens=24)

    def drafts(mode: str) -> list[list[tuple[int, ...]]]:
        replies = flexdraft.generate_all([r.speculative({"mode": mode, "records": True}) for r in asked], concurrency=4)
        return [[record.draft_ids for record in _records(reply)] for reply in replies]

    assert drafts("parallel") == drafts("sequential")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"mode": "paralel"}, ("paralel", "parallel")),
        ({"mod": "plain"}, ("mod", "mode")),
        ({"records": "yes"}, ("records", "true")),
        ({"script": 3}, ("script",)),
    ],
    ids=("unknown mode", "unknown key", "wrong type", "script is no string"),
)
def test_bad_overrides_get_400(
    flexdraft: Server, scripted: Server, override: dict[str, object], words: tuple[str, ...]
) -> None:
    """A bad override is the client's error: 400 with the reason, and the server goes on."""
    for server in (flexdraft, scripted):
        response = server.post("/generate", Request(PROMPTS[0]).speculative(override).body())
        assert response.status_code == 400, response.text
        assert all(word in response.text for word in words), response.text
        assert server.healthy()


def test_unknown_script_gets_400(scripted: Server) -> None:
    """A script that does not exist is the client's error too."""
    response = scripted.post("/generate", Request(PROMPTS[0]).speculative({"script": "orakle"}).body())
    assert response.status_code == 400, response.text
    assert "oracle" in response.text
    assert scripted.healthy()


def _records(reply: Reply) -> list[StepRecord]:
    return [StepRecord.from_dict(element) for element in reply.meta[RECORDS_KEY] if element is not None]
