"""The demo reaches servers over HTTP: it imports neither SGLang nor the rooms that know it, and breaks no habit."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "demo").glob("*.py"))
ALLOWED = {"sglang_ext.core", "sglang_ext.cli", "sglang_ext.bench.server"}
OTHERS = {"demo", "gradio", "playwright"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_imports_and_habits(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            top = name.partition(".")[0]
            if top == "sglang_ext":
                assert any(name == room or name.startswith(f"{room}.") for room in ALLOWED), name
            else:
                assert top in sys.stdlib_module_names or top in OTHERS, name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert not (node.func.id == "getattr" and len(node.args) == 3), f"{file.name}:{node.lineno}"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{file.name}:{node.lineno}: bare except"
        public = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) and not node.name.startswith(
            "_"
        )
        if public and node in tree.body:
            assert ast.get_docstring(node), f"{file.name}:{node.lineno} {node.name}"
    assert len(file.read_text().splitlines()) < 400, file.name


def test_html_is_made_in_one_way() -> None:
    """Only numbers, our own words and escaped text stand in markup: f-strings with tags are kept to a few files."""
    tagged = {
        file.name for file in FILES if "<" in file.read_text() and 'f"<' in file.read_text().replace("f'<", 'f"<')
    }
    assert tagged <= {"markup.py", "view.py", "plots.py", "app.py"}, tagged
