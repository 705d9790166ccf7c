"""Memory and scheduling where life is hard: a tiny pool, pages, small prefill chunks, forced retraction.

``small`` has a pool of 512 tokens and drafts by script; ``paged`` has pages of 16 tokens, drafts by FlexDraft and
accepts drafts by the target's probability alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_ext.testing.conservation import assert_conserves, named_request
from sglang_ext.testing.laws import assert_idle, assert_same, eventually
from sglang_ext.testing.prompts import LONG_TEXT, PROMPTS, requests
from sglang_ext.testing.sampling import assert_same_law
from sglang_ext.testing.server import Request, Server, Starter
from sglang_ext.testing.speculators import ALWAYS_DRAFT, MODES, Answers

WARNING = "drafts were accepted"
TARGET_ONLY = '{"acceptance": "target_only"}'


@pytest.fixture(scope="module")
def unusual(starter: Starter, drafter: Path) -> Iterator[dict[str, Server]]:
    """Both servers, started together."""
    small = starter.launch(
        *("--speculative-algorithm", "scripted", "--max-total-tokens", "512", "--page-size", "4"),
        *("--chunked-prefill-size", "32", "--context-length", "512", *ALWAYS_DRAFT),
        environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"},
    )
    paged = starter.launch(
        *("--speculative-algorithm", "flexdraft", "--speculative-draft-model-path", str(drafter)),
        *("--page-size", "16", "--chunked-prefill-size", "64", "--max-total-tokens", "4096"),
        *("--speculative-adaptive-config", TARGET_ONLY),
    )
    with starter.running(small=small, paged=paged) as servers:
        yield servers


@pytest.fixture(scope="module")
def zero_acceptance_log(unusual: dict[str, Server], reference: Answers) -> str:
    """The log of ``small`` after drafts that were all wrong, before it served anything else."""
    asked = requests(8, tokens=20)
    wrong = [r.speculative({"script": "wrong"}, e.ids) for r, e in zip(asked, reference(asked), strict=True)]
    for _ in range(2):
        unusual["small"].generate_all(wrong)
    return unusual["small"].log_text()


@pytest.fixture
def small(unusual: dict[str, Server], zero_acceptance_log: str) -> Server:
    """The tiny scripted server."""
    return unusual["small"]


@pytest.fixture
def paged(unusual: dict[str, Server]) -> Server:
    """The paged FlexDraft server."""
    return unusual["paged"]


def test_zero_acceptance_warns_once(zero_acceptance_log: str) -> None:
    """Law C5: drafts that are never accepted give one warning with the rate and likely causes."""
    lines = [line for line in zero_acceptance_log.splitlines() if WARNING in line]
    assert len(lines) == 1, lines
    assert "Only 0 of" in lines[0] and "0.00 %" in lines[0] and "Likely causes" in lines[0], lines


def test_useful_drafter_does_not_warn(scripted: Server, reference: Answers) -> None:
    """The other side of law C5: a server whose drafts help stays silent."""
    asked = requests(16)
    right = [r.speculative({"script": "oracle"}, e.ids) for r, e in zip(asked, reference(asked), strict=True)]
    scripted.generate_all(right)
    warned = [line for line in scripted.log_text().splitlines() if WARNING in line]
    assert all("Only 0 of" not in line for line in warned), warned


def test_small_pool(small: Server, plain: Server, reference: Answers) -> None:
    """Law M1: 16 requests of 128 tokens through a pool of 512 all finish with the plain text, retracted or not."""
    asked = [Request(prompt, {"max_new_tokens": 128, "ignore_eos": True}) for prompt in PROMPTS[:16]]
    expected = reference(asked)
    drafted = [
        request.speculative({"script": "half" if i % 4 == 3 else "oracle"}, reply.ids)
        for i, (request, reply) in enumerate(zip(asked, expected, strict=True))
    ]
    replies = small.generate_all(drafted)
    assert [reply.completion_tokens for reply in replies] == [128] * 16
    assert_same(plain, asked, expected, replies, "small pool")
    assert sum(reply.meta["num_retractions"] for reply in replies) > 0, "nothing was retracted: the test shows nothing"
    assert_idle(small)


@pytest.mark.parametrize("name", ("small", "paged"))
def test_prompt_longer_than_a_chunk(unusual: dict[str, Server], plain: Server, reference: Answers, name: str) -> None:
    """Law L4: prompts of several prefill chunks give the plain text cold and warm, with pages of 4 and 16 tokens."""
    server = unusual[name]
    asked = [Request(LONG_TEXT[:size] + "\nThe captain said", {"max_new_tokens": 16}) for size in (300, 600, 610, 900)]
    expected = reference(asked)
    server.flush()
    for temperature in ("cold", "warm"):
        for mode in MODES if name == "paged" else ("oracle",):
            drafted = [
                r.speculative({"mode": mode} if name == "paged" else {"script": mode}, e.ids)
                for r, e in zip(asked, expected, strict=True)
            ]
            assert_same(plain, asked, expected, server.generate_all(drafted), f"{name} {temperature} {mode}")


@pytest.mark.parametrize("narrow", ({"top_k": 1}, {"top_p": 1e-4}), ids=("top_k", "top_p"))
@pytest.mark.parametrize("mode", MODES)
def test_narrow_target_only_sampling_is_greedy(
    paged: Server, plain: Server, reference: Answers, mode: str, narrow: dict[str, float]
) -> None:
    """Law S5 under target-only acceptance: one token left to choose from equals greedy."""
    greedy = requests(8)
    asked = [
        Request(r.prompt, {**r.sampling, "temperature": 1.0, **narrow}).speculative({"mode": mode}) for r in greedy
    ]
    assert_same(plain, greedy, reference(greedy), paged.generate_all(asked), f"target only {mode} {narrow}")


def test_target_only_sampling_samples_as_plain_does(paged: Server, plain: Server) -> None:
    """Law S4 under target-only acceptance: the first tokens at temperature 1 are distributed as plain's."""
    sampled = Request(PROMPTS[15], {"max_new_tokens": 5, "temperature": 1.0, "ignore_eos": True})
    assert_same_law(plain, paged, sampled, sampled.speculative({"mode": "sequential"}))


@pytest.mark.parametrize("name", ("small", "paged"))
def test_no_token_is_lost(unusual: dict[str, Server], zero_acceptance_log: str, name: str) -> None:
    """Law M2 with pages of 4 and 16 tokens."""
    assert_conserves(unusual[name])


def test_abort_while_queued(small: Server) -> None:
    """Law M3: a request that waits for memory can be aborted; those that run are not touched."""
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(small.generate, named_request(f"running {i}", max_new_tokens=120)) for i in range(6)]
        eventually(lambda: small.load()["num_waiting_reqs"] > 0, 30, lambda: f"nothing waits: {small.load()}")
        queued = pool.submit(small.generate, named_request("queued", max_new_tokens=120))
        time.sleep(0.3)
        small.abort("queued")
        reply = queued.result(timeout=10)
        assert reply.finish["type"] == "abort" and reply.completion_tokens == 0, reply
        assert [future.result(timeout=120).completion_tokens for future in running] == [120] * 6
    assert_idle(small, within_s=5.0)


def test_abort_while_reading_the_prompt(paged: Server) -> None:
    """Law M3: a request in the middle of a chunked prefill can be aborted."""
    paged.flush()
    request = Request((LONG_TEXT * 3)[:5000], {"max_new_tokens": 300, "ignore_eos": True}, {"rid": "prefill"})
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(paged.generate, request)
        eventually(lambda: paged.load()["num_used_tokens"] > 0, 30, lambda: f"{paged.load()}")
        paged.abort("prefill")
        assert future.result(timeout=20).finish["type"] == "abort"
    assert_idle(paged, within_s=5.0)
