"""DFlare and DFlash servers of tiny random targets: lossless, and their drafts do not depend on how a token came in.

Each server's own plain mode is the reference of its text. The reference of its drafts is the same server with an empty
prefix cache: the confidence of every draft depends on the whole context, so a token without drafter keys and values,
or with another token's, shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers

from sglang_ext.testing.laws import assert_idle, assert_records, read_aligned
from sglang_ext.testing.server import Launch, Reply, Request, Server, Starter
from sglang_ext.testing.tapped_drafters import untrained_tapped_drafter
from tests.unit.tiny import target_config, write_target

LLAMA, QWEN3 = "llama, gqa, tied, head_dim derived", "qwen3, gqa, untied, head_dim given"
PROMPTS = [[(11 * row + (3 + row) * i) % 60 for i in range(length)] for row, length in enumerate((1, 2, 9, 17, 40, 90))]
MANY = [[(17 * row + 5 * i) % 60 for i in range(12)] for row in range(24)]
LONG = [(7 * i + i // 9) % 60 for i in range(150)]
BLOCK = 6
#: name -> target, method, further flags. Two servers are up at a time.
PAIRS: dict[str, dict[str, tuple[str, str, tuple[str, ...]]]] = {
    "llama": {
        "one pass": (LLAMA, "dflare", ()),
        "dflash, pages of 16, chunks": (LLAMA, "dflash", ("--page-size", "16", "--chunked-prefill-size", "32")),
    },
    "qwen3": {
        "chunks": (QWEN3, "dflare", ("--chunked-prefill-size", "32")),
        "small pool, no prefix cache": (QWEN3, "dflare", ("--disable-radix-cache", "--max-total-tokens", "512")),
    },
}
RETRACTING = {
    "retraction": {"pages of 4, chunks": (LLAMA, "dflare", ("--page-size", "4", "--chunked-prefill-size", "32"))}
}
ENVIRONMENT = {"retraction": {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}}


@pytest.fixture(scope="module", params=PAIRS)
def servers(
    request: pytest.FixtureRequest, starter: Starter, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """A pair, started together."""
    launches = {}
    wanted = {**PAIRS, **RETRACTING}[request.param]
    environment = ENVIRONMENT.get(request.param, {})
    for number, (shape, method, flags) in enumerate(wanted.values()):
        folder = tmp_path_factory.mktemp(f"dflare{number}")
        target = write_target(folder / "target", target_config(shape, max_position_embeddings=512, rope_theta=10000.0))
        drafter = untrained_tapped_drafter(
            target,
            folder / "drafter",
            method=method,
            block_size=BLOCK,
            target_layer_ids=(0, 2, 3),
            favourite=common_token(target),
        )
        common = ("--speculative-algorithm", "dflare", "--speculative-draft-model-path", str(drafter))
        context = ("--skip-tokenizer-init", "--context-length", "512", "--max-total-tokens", "4096")
        launches[f"{request.param}{number}"] = Launch(target, (*common, *context, *flags), environment, starter.threads)
    with starter.running(**launches) as running:
        yield dict(zip(wanted, running.values(), strict=True))


def common_token(target: Path) -> int:
    """Return the token that the target says most often."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    said = model.generate(torch.tensor(MANY), max_new_tokens=40, do_sample=False)[:, len(MANY[0]) :]
    return int(said.flatten().mode().values)


def with_prefix_cache(servers: dict[str, Server]) -> list[Server]:
    """Return the servers of a pair that reuse prefixes."""
    return [server for name, server in servers.items() if "no prefix cache" not in name]


def asking(prompt: Sequence[int], mode: str, **sampling: object) -> Request:
    """Return a request that verifies every draft and reports every step."""
    options = {"mode": mode, "pruning": "none", "records": True}
    return Request(prompt, {"max_new_tokens": 24, "ignore_eos": True, **sampling}).speculative(options)


def drafts(reply: Reply) -> list[tuple[list[int], list[float]]]:
    """Return the drafts of every step with their confidences."""
    return [(record.draft_ids, record.confidence) for _, record in read_aligned(reply) if record.draft_ids]


def assert_same_drafts(left: Reply, right: Reply) -> None:
    """Hold two replies to the same drafts, step by step."""
    ours, theirs = drafts(left), drafts(right)
    assert ours and [ids for ids, _ in ours] == [ids for ids, _ in theirs]
    for (_, mine), (_, other) in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)


def test_text_is_the_plain_one(servers: dict[str, Server]) -> None:
    """Law L1 for every target, method and layout of the pool; also the counters and records of each reply."""
    for name, server in servers.items():
        expected = server.generate_all([asking(prompt, "plain") for prompt in PROMPTS])
        for concurrency in (1, len(PROMPTS)):
            got = server.generate_all([asking(prompt, "sequential") for prompt in PROMPTS], concurrency)
            assert [reply.ids for reply in got] == [reply.ids for reply in expected], name
            for reply in got:
                assert_records(reply, BLOCK)
                assert reply.meta["spec_num_proposed_drafts"] > 0


def test_several_tokens_are_committed_at_once(servers: dict[str, Server]) -> None:
    """The drafts are right now and then, so that commits of several rows are in what the other laws see."""
    correct = 0
    for server in servers.values():
        expected = server.generate_all([asking(prompt, "plain", max_new_tokens=40) for prompt in MANY])
        got = server.generate_all([asking(prompt, "sequential", max_new_tokens=40) for prompt in MANY])
        assert [reply.ids for reply in got] == [reply.ids for reply in expected]
        correct += sum(reply.meta["spec_num_correct_drafts"] for reply in got)
    assert correct > 0


def test_drafts_do_not_depend_on_the_prefix_cache(servers: dict[str, Server]) -> None:
    """A prefix hit has drafter keys and values: cold and warm, with and without chunks and pages, drafts are equal."""
    for server in with_prefix_cache(servers):
        server.flush()
        cold = server.generate(asking(LONG, "sequential"))
        warm = server.generate(asking(LONG, "sequential"))
        assert cold.meta["cached_tokens"] == 0 < warm.meta["cached_tokens"]
        assert_same_drafts(cold, warm)


@pytest.mark.parametrize("servers", ("qwen3",), indirect=True)
def test_drafts_do_not_depend_on_chunks(servers: dict[str, Server]) -> None:
    """Prompts of several prefill chunks leave the context that a single pass leaves."""
    chunked, whole = servers.values()
    chunked.flush()
    for prompt in (*PROMPTS, LONG):
        assert_same_drafts(whole.generate(asking(prompt, "sequential")), chunked.generate(asking(prompt, "sequential")))


@pytest.mark.parametrize("mode", ("plain", "sequential"))
def test_tokens_committed_while_decoding_can_be_drafted_from(servers: dict[str, Server], mode: str) -> None:
    """What one request decoded, plainly or not, is another's cached prompt, with the drafts of a cold one."""
    for server in with_prefix_cache(servers):
        prompt = PROMPTS[3]
        server.flush()
        first = server.generate(asking(prompt, mode, max_new_tokens=60))
        longer = asking([*prompt, *first.ids, 5], "sequential")
        warm = server.generate(longer)
        assert warm.meta["cached_tokens"] >= len(prompt) + 32
        server.flush()
        assert_same_drafts(server.generate(longer), warm)


def test_drafts_do_not_depend_on_the_company(servers: dict[str, Server]) -> None:
    """Alone and in a batch of requests that decode plainly, sample, or leave early, a request gets the same drafts."""
    for server in servers.values():
        alone = server.generate(asking(PROMPTS[4], "sequential"))
        others = [
            asking(PROMPTS[2], "plain"),
            asking(PROMPTS[5], "sequential", temperature=1.0),
            asking(PROMPTS[3], "sequential", max_new_tokens=3),
        ]
        together = server.generate_all([asking(PROMPTS[4], "sequential"), *others])[0]
        assert together.ids == alone.ids
        assert_same_drafts(alone, together)


@pytest.mark.parametrize("servers", ("retraction",), indirect=True)
def test_retracted_requests_go_on(servers: dict[str, Server]) -> None:
    """Law M1: requests that are retracted in the middle and read again give the plain text, drafted for."""
    (server,) = servers.values()
    expected = server.generate_all([asking(prompt, "plain", max_new_tokens=60) for prompt in MANY[:16]])
    got = server.generate_all([asking(prompt, "sequential", max_new_tokens=60) for prompt in MANY[:16]])
    assert [reply.ids for reply in got] == [reply.ids for reply in expected]
    assert sum(reply.meta["num_retractions"] for reply in got) > 0, "nothing was retracted: the test shows nothing"
    assert sum(reply.meta["spec_num_correct_drafts"] for reply in got) > 0
    assert_idle(server)


def test_parallel_mode_is_answered_with_400(servers: dict[str, Server]) -> None:
    """A drafter with layers of its own never joins the target's pass."""
    for server in servers.values():
        answer = server.post("/generate", asking(PROMPTS[2], "parallel").body())
        assert answer.status_code == 400
        assert "parallel" in answer.text and "sequential" in answer.text, answer.text
        assert server.healthy()


def test_memory_is_what_was_said(servers: dict[str, Server]) -> None:
    """The start log and /server_info state the drafter's bytes; the pool has a row for every slot of the target's."""
    for server in servers.values():
        info = server.get("/server_info")
        (state,) = info["internal_states"]
        per_token = state["speculative_drafter_kv_bytes_per_token"]
        # Two layers' keys and values in fp32; both targets' drafters have 16 numbers per key.
        assert per_token == 2 * 2 * 16 * 4
        assert state["speculative_drafter_bytes"] > 0
        lines = server.log_text().splitlines()
        (plan,) = [line for line in lines if "Speculative plan" in line]
        assert f"drafter KV {per_token} bytes per token" in plan, plan
        (pool,) = [line for line in lines if "Drafter KV pool" in line]
        slots = info["max_total_num_tokens"] + info["page_size"]
        assert f"{per_token} bytes per token, {slots} slots, {per_token * slots / 1e6:.1f} MB" in pool, (pool, slots)


def test_no_token_is_lost(servers: dict[str, Server]) -> None:
    """Law M2: after mixed requests, aborts and clients that leave, an empty cache holds nothing."""
    modes = ("sequential", "plain", "auto")
    asked = [asking(PROMPTS[i % 6], modes[i % 3], max_new_tokens=1 + i % 30) for i in range(60)]
    for server in servers.values():
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda pair, server=server: _send(server, *pair), enumerate(asked)))
        assert_idle(server)
        server.flush()
        load = server.load()
        assert load["num_used_tokens"] == 0 == load["num_total_tokens"], load
        assert server.healthy()


def _send(server: Server, index: int, request: Request) -> None:
    if index % 13 == 5:
        response = server.post("/generate", {**request.body(), "stream": True}, stream=True)
        next(response.iter_lines())
        response.close()
        return
    if index % 17 == 3:
        with ThreadPoolExecutor(1) as pool:
            named = Request(request.prompt, request.sampling, {**request.fields, "rid": f"mixed {index}"})
            future = pool.submit(server.generate, named)
            server.abort(f"mixed {index}")
            future.result()
        return
    server.generate(request)
