"""Frontend programs (``sgl.function``) against the FlexDraft server equal the same programs against plain (law W2)."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from sglang_ext.testing.server import Server

EXAMPLE = Path(__file__).parents[2] / "scripts" / "examples" / "frontend_program.py"


@pytest.fixture(scope="module")
def programs() -> ModuleType:
    """The example's module."""
    spec = importlib.util.spec_from_file_location("frontend_program", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_programs_equal_plain(programs: ModuleType, plain: Server, flexdraft: Server) -> None:
    """Generation with a regex, selection, forks and streaming give the plain results."""
    expected = programs.run_all(plain.url)
    got = programs.run_all(flexdraft.url)
    assert got == expected
    assert re.fullmatch("[A-Z][a-z]{1,9}", got["name"]) and re.fullmatch("[0-9]{1,3}", got["age"])
    assert got["answer"] in ("yes", "no", "maybe")
    assert got["streamed"].strip() == got["story"].strip()


def test_programs_in_batches(programs: ModuleType, plain: Server, flexdraft: Server) -> None:
    """Eight programs at once give what they give on plain."""
    import sglang as sgl

    heroes = [
        {"hero": name} for name in ("a cat", "a ship", "a tree", "a clock", "a king", "a frog", "a star", "a boy")
    ]
    texts = []
    for server in (plain, flexdraft):
        states = programs.story.run_batch(
            heroes, backend=sgl.RuntimeEndpoint(server.url), temperature=0, num_threads=8, progress_bar=False
        )
        texts.append([state["story"] for state in states])
    assert texts[0] == texts[1]
