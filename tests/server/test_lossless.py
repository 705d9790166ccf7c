"""Losslessness: at temperature 0 the output is the plain server's, whoever drafts."""

from __future__ import annotations

import pytest

from sglang_ext.testing.laws import assert_same
from sglang_ext.testing.prompts import LONG_TEXT, PROMPTS, chat, requests
from sglang_ext.testing.server import Request, Server
from sglang_ext.testing.speculators import FEW, Answers, Speculator

few = pytest.mark.parametrize("speculator", FEW, indirect=True)


def test_forty_prompts_equal_plain(speculator: Speculator) -> None:
    """Law L1, for every script and mode; also laws C6 (NaN and out-of-range drafts) and the counter identities."""
    assert len(PROMPTS) >= 40
    replies = speculator.hold(requests())
    rates = [reply.meta["spec_num_correct_drafts"] for reply in replies if "spec_verify_ct" in reply.meta]
    if speculator.name in ("wrong", "bad", "nan"):
        assert sum(rates) == 0, "a drafter that is never right was believed"
    if speculator.name == "oracle":
        lengths = [reply.meta["spec_accept_length"] for reply in replies if reply.completion_tokens == 20]
        assert min(lengths) > speculator.block_size / 2, ("an oracle's drafts were rejected", lengths)


@few
@pytest.mark.parametrize("together", (False, True), ids=("alone", "together"))
def test_every_prompt_length(speculator: Speculator, plain: Server, together: bool) -> None:
    """Law L2: prompts of 1 to 2B + 2 tokens, one at a time and all in one batch."""
    ids = plain.tokenize(LONG_TEXT)
    lengths = range(1, 2 * speculator.block_size + 3)
    asked = [Request(ids[:length], {"max_new_tokens": 10}) for length in lengths]
    speculator.hold(asked, concurrency=len(asked) if together else 1)


@few
def test_shared_prefixes(speculator: Speculator) -> None:
    """Law L3: one prompt eight times at once, cold and warm, and eight prompts that share nine tenths."""
    speculator.server.flush()
    same = [Request(PROMPTS[4], {"max_new_tokens": 20})] * 8
    speculator.hold(same)
    speculator.hold(same)
    shared = LONG_TEXT[:500]
    speculator.hold([Request(f"{shared} On day {day} the captain", {"max_new_tokens": 16}) for day in range(8)])


@few
def test_long_prompt_cold_and_warm(speculator: Speculator) -> None:
    """Law L4 on the shared servers: a long prompt gives the plain text cold and from the prefix cache."""
    asked = [Request(LONG_TEXT + "\nSummary:", {"max_new_tokens": 16})]
    speculator.server.flush()
    cold = speculator.hold(asked)[0]
    warm = speculator.hold(asked)[0]
    assert cold.meta["cached_tokens"] == 0 < warm.meta["cached_tokens"]


@few
def test_greedy_rows_among_sampled_ones(speculator: Speculator) -> None:
    """Law L5: a greedy request's text does not depend on sampled requests in its batch."""
    asked = requests(12, tokens=16)
    expected = speculator.reference(asked)
    mixed = [
        speculator.request(
            request if i % 2 == 0 else Request(request.prompt, {**request.sampling, "temperature": 1.0}), reply
        )
        for i, (request, reply) in enumerate(zip(asked, expected, strict=True))
    ]
    replies = speculator.server.generate_all(mixed)
    assert_same(speculator.plain, asked[::2], expected[::2], replies[::2], speculator.name)


def test_hundredth_request_and_concurrency(flexdraft: Server, plain: Server, reference: Answers) -> None:
    """Law L6: the 100th request behaves as the first, and 16 at once keep the solo accept length within 10 %."""
    asked = requests(16, tokens=24)
    first = flexdraft.generate_all(asked, concurrency=1)
    assert_same(plain, asked, reference(asked), first, "solo")
    flexdraft.generate_all([Request(chat(f"Say {i}."), {"max_new_tokens": 3}) for i in range(84)])
    again = flexdraft.generate(asked[0])
    assert (again.ids, again.meta["spec_verify_ct"]) == (first[0].ids, first[0].meta["spec_verify_ct"])
    crowd = flexdraft.generate_all(asked)
    assert_same(plain, asked, reference(asked), crowd, "16 at once")
    solo_length, crowd_length = (
        sum(reply.completion_tokens for reply in replies) / sum(reply.meta["spec_verify_ct"] for reply in replies)
        for replies in (first, crowd)
    )
    assert abs(crowd_length - solo_length) <= 0.1 * solo_length, (solo_length, crowd_length)
