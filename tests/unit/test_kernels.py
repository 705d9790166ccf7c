"""Fused pieces equal their torch twins, and nothing needs Triton to be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIECES = sorted(file.stem for file in (ROOT / "sglang_ext" / "kernels").glob("[a-z]*.py"))


def test_every_piece_has_a_parity_test() -> None:
    tested = {file.stem.removeprefix("test_") for file in (ROOT / "tests" / "kernels").glob("test_*.py")}
    assert tested == set(PIECES) - {"language"}


def test_every_piece_equals_its_twin_in_tritons_interpreter() -> None:
    """In a process of its own: Triton decides for the interpreter when it is imported."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels"]
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "passed" in run.stdout
    assert "skipped" not in run.stdout


def test_pieces_import_and_their_twins_run_without_triton() -> None:
    code = f"""
import sys
sys.modules["triton"] = None
import importlib, torch
for piece in {PIECES!r}:
    importlib.import_module(f"sglang_ext.kernels.{{piece}}")
from sglang_ext.kernels.draft_choice import draft_choice, draft_choice_fused
from sglang_ext.kernels.pool_slots import slots_of
print(draft_choice(torch.tensor([[[0.0, 9.0]]]))[0].item())
print(slots_of(torch.tensor([[5, 6, 7]]), torch.tensor([0]), None, [2]).tolist())
try:
    draft_choice_fused(torch.zeros(1, 1, 2))
except RuntimeError as error:
    print(error)
"""
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True)
    assert run.stdout.splitlines()[:2] == ["1", "[5, 6]"]
    assert "without Triton" in run.stdout.splitlines()[2]
