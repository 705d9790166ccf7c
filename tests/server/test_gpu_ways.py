"""A server that works the way a GPU server does says what an ordinary one says, and drafts what it drafts.

Row counts alike for all requests, nothing read back, overlapped scheduling, attention planned on the host through
FlashInfer's twin, captured passes: everything of a GPU server but its kernels, in the host's real processes. Targets
and drafters are tiny and random; the scripted drafter sees to it that drafts are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from sglang_ext.models.flexdraft import checkpoint
from sglang_ext.testing.scripts import SCRIPTS
from sglang_ext.testing.server import Launch, Reply, Request, Server, Starter
from tests.server.ways import the_gpu_way
from tests.unit import tiny_tapped
from tests.unit.tiny import drafter_config, random_tensors, target_config, write_target

QWEN = "qwen3, gqa, untied, head_dim given"
PROMPTS = [[(7 * row + 3 * i) % 60 for i in range(length)] for row, length in enumerate((1, 5, 17, 40, 8))]
SMALL = ("--skip-tokenizer-init", "--context-length", "128", "--max-total-tokens", "2048")
NEW_TOKENS = 24
EVERY_DRAFT = {"prune_threshold": 1e-9, "records": True}


@dataclass(frozen=True)
class Pair:
    """One algorithm's server both ways, and the modes it drafts in."""

    ordinary: Server
    gpu: Server
    modes: tuple[str, ...]


@pytest.fixture(scope="module", params=["flexdraft", "dflare"])
def pair(request: pytest.FixtureRequest, starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """An ordinary server and one that works the GPU's way."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "flexdraft":
        target = write_target(folder / "target", target_config(QWEN))
        config = drafter_config(QWEN)
        checkpoint.save(folder / "drafter", config, random_tensors(config), target_config(QWEN))
    else:
        target = write_target(folder / "target", target_config(num_hidden_layers=tiny_tapped.LAYERS, rope_theta=5000.0))
        tiny_tapped.write_own(folder / "drafter", "dflare")
    chosen = ("--speculative-algorithm", request.param, "--speculative-draft-model-path", str(folder / "drafter"))
    ordinary = Launch(target, (*chosen, *SMALL), {}, starter.threads)
    with starter.running(ordinary=ordinary, gpu=the_gpu_way(ordinary)) as running:
        modes = ("parallel", "sequential") if request.param == "flexdraft" else ("sequential",)
        yield Pair(running["ordinary"], running["gpu"], modes)


@pytest.fixture(scope="module")
def scripted(starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A scripted server that works the GPU's way and reads long prompts in parts."""
    target = write_target(tmp_path_factory.mktemp("scripted") / "target", target_config(QWEN))
    options = ("--speculative-adaptive-config", '{"adaptive": false}', "--chunked-prefill-size", "16")
    flags = ("--speculative-algorithm", "scripted", *options, *SMALL)
    with starter.running(scripted_gpu=the_gpu_way(Launch(target, flags, {}, starter.threads))) as running:
        yield running["scripted_gpu"]


def asked(options: dict[str, Any], sampling: dict[str, Any] | None = None, **fields: Any) -> list[Request]:
    """A request per prompt."""
    common = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **(sampling or {})}
    return [Request(prompt, common, fields).speculative(options) for prompt in PROMPTS]


def records(reply: Reply) -> list[dict[str, Any]]:
    """The steps of an answer that verified or could have verified drafts."""
    return [record for record in reply.meta["speculative"] if record and record["mode"] != "prefill"]


@pytest.mark.parametrize("concurrency", [1, 5])
def test_texts_and_drafts_are_those_of_the_cpus_way(pair: Pair, concurrency: int) -> None:
    """One at a time, passes are replayed; five together are more than any captured pass holds."""
    expected = pair.ordinary.generate_all(asked({"mode": "plain"}))
    for mode in pair.modes:
        ordinary = pair.ordinary.generate_all(asked({"mode": mode, **EVERY_DRAFT}), concurrency)
        replies = pair.gpu.generate_all(asked({"mode": mode, **EVERY_DRAFT}), concurrency)
        for reply, same, plain in zip(replies, ordinary, expected, strict=True):
            assert reply.ids == same.ids == plain.ids
            found, due = records(reply), records(same)
            assert found[0]["mode"] == mode
            assert any(record["verify_length"] for record in found)
            for step, (one, other) in enumerate(zip(found, due, strict=True)):
                # Overlapped scheduling notices the end of a request a step later: it may verify one draft more.
                common = min(one["verify_length"], other["verify_length"])
                assert one["draft_ids"][:common] == other["draft_ids"][:common], f"{mode}, step {step}"
                assert min(one["accepted"], common) == min(other["accepted"], common), f"{mode}, step {step}"


def test_passes_were_replayed(pair: Pair) -> None:
    pair.gpu.generate_all(asked({}, {"max_new_tokens": 80}), 2)
    log = pair.gpu.log_text()
    assert "Captured" in log
    assert "cpu graph: True" in log


def test_requests_of_all_kinds_share_a_batch(pair: Pair) -> None:
    """Sampled, penalised, short, and with logprobs, beside greedy ones: each of these is answered as it is alone."""
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"temperature": 1.0, "top_k": 5}, {}),
        ({"frequency_penalty": 1.5}, {}),
        ({"max_new_tokens": 3}, {}),
        ({}, {"return_logprob": True, "top_logprobs_num": 2}),
    ]
    mixed = [
        asked({"mode": pair.modes[row % len(pair.modes)], **EVERY_DRAFT}, sampling, **fields)[row]
        for row, (sampling, fields) in enumerate(kinds)
    ]
    alone = pair.gpu.generate_all(mixed, 1)
    for row, (reply, same) in enumerate(zip(pair.gpu.generate_all(mixed, 5), alone, strict=True)):
        # Under overlapped scheduling the host counts a token towards penalties a step late, or not, as steps fall.
        depends = {"temperature", "frequency_penalty"} & set(kinds[row][0])
        assert reply.ids == same.ids or depends
        assert reply.completion_tokens == same.completion_tokens
    logprobs = alone[4].meta["output_token_logprobs"]
    assert [token for _, token, *_ in logprobs] == alone[4].ids
    assert all(value <= 0 for value, *_ in logprobs)
    assert len(alone[3].ids) == 3


def test_unseeded_samples_end_and_stay_in_the_vocabulary(pair: Pair) -> None:
    for mode in pair.modes:
        replies = pair.gpu.generate_all(asked({"mode": mode, **EVERY_DRAFT}, {"temperature": 1.0}))
        assert all(len(reply.ids) == NEW_TOKENS for reply in replies)
        assert all(0 <= token < 61 for reply in replies for token in reply.ids)


def test_a_request_may_fill_its_context(pair: Pair) -> None:
    """Rows past the last position belong to a request that ends in this very step."""
    request = Request([5] * 100, {"max_new_tokens": 27, "ignore_eos": True})
    expected = pair.ordinary.generate(request.speculative({"mode": "plain"}))
    for mode in pair.modes:
        assert pair.gpu.generate(request.speculative({"mode": mode, **EVERY_DRAFT})).ids == expected.ids


def test_the_prefix_cache_serves_drafters_too(pair: Pair) -> None:
    for mode in pair.modes:
        requests = asked({"mode": mode, **EVERY_DRAFT})
        first = pair.gpu.generate_all(requests, 2)
        again = pair.gpu.generate_all(requests, 2)
        pair.gpu.flush()
        fresh = pair.gpu.generate_all(requests, 2)
        assert [reply.ids for reply in first] == [reply.ids for reply in again] == [reply.ids for reply in fresh]


@pytest.mark.parametrize("script", SCRIPTS)
def test_whatever_is_drafted_the_text_is_the_targets(scripted: Server, script: str) -> None:
    expected = [reply.ids for reply in scripted.generate_all(asked({"mode": "plain"}), 1)]
    for concurrency in (1, 3, 5):
        requests = [
            request.speculative({"script": script, "records": True}, ids)
            for request, ids in zip(asked({}), expected, strict=True)
        ]
        replies = scripted.generate_all(requests, concurrency)
        assert [reply.ids for reply in replies] == expected, f"{script}, {concurrency} at a time"
        accepted = sum(record["accepted"] for reply in replies for record in records(reply))
        assert (accepted > 0) == (script in ("oracle", "half")) or script in ("eos", "noise"), script


def test_a_prompt_read_in_parts_is_drafted_for_at_once(scripted: Server) -> None:
    """The host counts a part as read a step late; the last one is told from the others without that count."""
    request = asked({})[3]
    expected = scripted.generate(request.speculative({"mode": "plain"})).ids
    scripted.flush()  # or the prefix cache has the prompt
    reply = scripted.generate(request.speculative({"script": "oracle", "records": True}, expected))
    assert reply.ids == expected
    assert records(reply)[0]["verify_length"] > 0
