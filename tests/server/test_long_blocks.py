"""Blocks of sixteen, the published drafters' size: rows of the host's slot table must hold what a step reserves."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_ext.testing.drafters import untrained_drafter
from sglang_ext.testing.laws import assert_idle, assert_same
from sglang_ext.testing.prompts import LONG_TEXT
from sglang_ext.testing.server import Request, Starter
from sglang_ext.testing.speculators import ALWAYS_DRAFT

CONTEXT = 256
BLOCK = 16


def test_many_requests_end_at_the_context_limit(
    starter: Starter, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Law T4: side by side in the table, none writes over another and the text is plain's."""
    drafter = untrained_drafter(target, tmp_path_factory.mktemp("sixteen"), block_size=BLOCK)
    common = ("--context-length", str(CONTEXT), "--max-total-tokens", "8192")
    plain = starter.launch(*common)
    long = starter.launch(
        *common,
        *("--speculative-algorithm", "flexdraft", "--speculative-draft-model-path", str(drafter)),
        *ALWAYS_DRAFT,
    )
    with starter.running(plain=plain, long=long) as servers:
        ids = servers["plain"].tokenize(LONG_TEXT)[:CONTEXT]
        asked = [
            Request(ids[: CONTEXT - new], {"max_new_tokens": new, "ignore_eos": True, "temperature": 0.0})
            for new in range(20, 20 + BLOCK + 4)
        ]
        expected = servers["plain"].generate_all(asked)
        got = servers["long"].generate_all(asked)
        assert_same(servers["plain"], asked, expected, got, "blocks of sixteen")
        assert_idle(servers["long"])
