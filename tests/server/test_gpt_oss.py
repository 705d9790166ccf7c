"""GPT-OSS as a target of DFlare: mixture of experts, attention sinks, alternating sliding windows; tiny and random.

The reference is a server of the same target without speculation.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_ext.testing.laws import assert_idle, assert_records
from sglang_ext.testing.server import Launch, Request, Server, Starter
from sglang_ext.testing.tapped_drafters import untrained_tapped_drafter
from tests.unit.tiny import write_target

LAYERS, BLOCK, WINDOW = 6, 6, 16
CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "vocab_size": 61,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 128,
    },
}
PROMPTS = [[(11 * row + (3 + row) * i) % 60 for i in range(length)] for row, length in enumerate((1, 9, 17, 40, 90))]
#: The host accepts only these names for the family; on a CPU both are served by the package's own code.
FAMILY_FLAGS = ("--attention-backend", "triton", "--moe-runner-backend", "triton")


@pytest.fixture(scope="module")
def servers(starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """The target alone, and with an untrained drafter."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    target = write_target(folder / "target", CONFIG)
    drafter = untrained_tapped_drafter(
        target, folder / "drafter", block_size=BLOCK, target_layer_ids=(0, 1, 3, 4), favourite=7
    )
    common = ("--skip-tokenizer-init", "--context-length", "512", "--max-total-tokens", "2048", *FAMILY_FLAGS)
    dflare = ("--speculative-algorithm", "dflare", "--speculative-draft-model-path", str(drafter))
    launches = {
        "plain": Launch(target, common, {}, starter.threads),
        "dflare": Launch(target, (*common, *dflare, "--chunked-prefill-size", "32"), {}, starter.threads),
    }
    with starter.running(**launches) as running:
        yield running


def test_text_is_the_plain_one(servers: dict[str, Server]) -> None:
    """Law L1, prompts and answers longer than the window included; cold and from the prefix cache."""
    asked = [Request(prompt, {"max_new_tokens": 40, "ignore_eos": True}) for prompt in PROMPTS]
    expected = [reply.ids for reply in servers["plain"].generate_all(asked)]
    for mode in ("sequential", "plain", "sequential"):
        options = {"mode": mode, "pruning": "none", "records": True}
        for concurrency in (1, len(asked)):
            got = servers["dflare"].generate_all([request.speculative(options) for request in asked], concurrency)
            assert [reply.ids for reply in got] == expected, mode
            for reply in got:
                assert_records(reply, BLOCK)
                assert (reply.meta["spec_num_proposed_drafts"] > 0) == (mode == "sequential")


def test_no_token_is_lost(servers: dict[str, Server]) -> None:
    """Law M2 with the two pools that the family keeps."""
    server = servers["dflare"]
    server.generate_all([Request(prompt, {"max_new_tokens": 1 + 7 * i}) for i, prompt in enumerate(PROMPTS * 4)])
    assert_idle(server)
    server.flush()
    assert server.load()["num_used_tokens"] == 0
    assert server.healthy()
