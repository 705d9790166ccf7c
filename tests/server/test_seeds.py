"""Seeds: where plain decoding reproduces a seeded request, speculative decoding gives the very same text (law S7).

The host honours ``sampling_seed`` only with ``--enable-deterministic-inference``, so this law has its own
two servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.testing.laws import assert_identities
from sglang_ext.testing.prompts import PROMPTS
from sglang_ext.testing.server import Request, Server, Starter
from sglang_ext.testing.speculators import MODES, block_size

# The host samples a whole batch one way or the other, so a seed means one text among requests of the same kind.
SAMPLINGS = ({"temperature": 1.0}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9})


@pytest.fixture(scope="module")
def deterministic(starter: Starter, drafter: Path) -> Iterator[dict[str, Server]]:
    """A plain and a FlexDraft server in the host's deterministic mode."""
    common = ("--enable-deterministic-inference", "--attention-backend", "torch_native")
    flexdraft = ("--speculative-algorithm", "flexdraft", "--speculative-draft-model-path", str(drafter))
    with starter.running(
        seeded_plain=starter.launch(*common), seeded_flexdraft=starter.launch(*common, *flexdraft)
    ) as servers:
        yield servers


def _seeded(seed: int, prompt: str, sampling: dict[str, float]) -> Request:
    return Request(prompt, {**sampling, "sampling_seed": seed, "max_new_tokens": 20})


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=("whole vocabulary", "truncated"))
@pytest.mark.parametrize("mode", MODES)
def test_a_seed_reproduces(deterministic: dict[str, Server], mode: str, sampling: dict[str, float]) -> None:
    """Alone, again, and in a batch of 8, a seeded request gives one text, and it is the plain server's."""
    plain, flexdraft = deterministic["seeded_plain"], deterministic["seeded_flexdraft"]
    asked = [_seeded(100 + i, prompt, sampling) for i, prompt in enumerate(PROMPTS[12:20])]
    expected = [reply.ids for reply in plain.generate_all(asked)]
    assert [reply.ids for reply in plain.generate_all(asked, concurrency=1)] == expected, "plain itself does not"
    drafted = [request.speculative({"mode": mode}) for request in asked]
    alone = flexdraft.generate_all(drafted, concurrency=1)
    together = flexdraft.generate_all(drafted)
    assert [reply.ids for reply in alone] == expected
    assert [reply.ids for reply in together] == expected
    for reply in together:
        assert_identities(reply, block_size(flexdraft))


def test_other_seeds_give_other_texts(deterministic: dict[str, Server]) -> None:
    """Seeds matter: sixteen of them give more than a few texts."""
    asked = [_seeded(seed, PROMPTS[12], {"temperature": 1.0}) for seed in range(16)]
    replies = deterministic["seeded_flexdraft"].generate_all(asked)
    assert len({tuple(reply.ids) for reply in replies}) > 8
