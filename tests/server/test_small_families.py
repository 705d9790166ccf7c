"""Targets of every supported shape, tiny and random: q/k norms present and absent, tied and untied, GQA and MHA.

One FlexDraft server per target; its own plain mode is the reference, and each drafting mode must say the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.models.flexdraft import checkpoint
from sglang_ext.testing.server import Launch, Request, Server, Starter
from tests.unit.tiny import TARGETS, drafter_config, random_tensors, target_config, write_target

# The default target of the other suites is a Llama with GQA, tied embeddings and a derived head size.
SHAPES = [name for name in TARGETS if name != "llama, gqa, tied, head_dim derived"]
PROMPTS = [[(7 * row + 3 * i) % 60 for i in range(length)] for row, length in enumerate((1, 5, 17, 40))]


@pytest.fixture(scope="module")
def families(starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """A server per shape, started together."""
    launches = {}
    for number, name in enumerate(SHAPES):
        folder = tmp_path_factory.mktemp(f"family{number}")
        target = write_target(folder / "target", target_config(name))
        config = drafter_config(name, calibrator="hidden" if number % 2 else "vocabulary")
        checkpoint.save(folder / "drafter", config, random_tensors(config), target_config(name))
        launches[f"family{number}"] = Launch(target, _flags(folder / "drafter"), {}, starter.threads)
    with starter.running(**launches) as servers:
        yield dict(zip(SHAPES, servers.values(), strict=True))


def _flags(drafter: Path) -> tuple[str, ...]:
    return (
        *("--speculative-algorithm", "flexdraft", "--speculative-draft-model-path", str(drafter)),
        *("--skip-tokenizer-init", "--context-length", "128", "--max-total-tokens", "2048"),
    )


@pytest.mark.parametrize("name", SHAPES)
def test_every_mode_says_what_plain_decoding_says(families: dict[str, Server], name: str) -> None:
    server = families[name]
    asked = [Request(prompt, {"max_new_tokens": 24, "ignore_eos": True}) for prompt in PROMPTS]
    expected = [reply.ids for reply in server.generate_all([r.speculative({"mode": "plain"}) for r in asked])]
    for mode in ("parallel", "sequential"):
        got = server.generate_all([r.speculative({"mode": mode, "records": True}) for r in asked])
        assert [reply.ids for reply in got] == expected, f"{name}, {mode}"
        assert all(reply.meta["spec_num_proposed_drafts"] > 0 for reply in got)
