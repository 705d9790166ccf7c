"""What several modules of this suite use."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "gpu"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """Import a script the way its siblings do."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    names = {file.stem for file in SCRIPTS.glob("*.py")}

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in names & set(sys.modules):
        del sys.modules[name]
