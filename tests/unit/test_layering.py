"""Who may import whom, and the habits that no file breaks: read from the source, so nothing has to be importable."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sglang_ext"
FILES = sorted(PACKAGE.rglob("*.py"))

#: room -> rooms of this package it may import. A room is a folder, or a file at the top.
ROOMS: dict[str, set[str]] = {
    "__init__": set(),
    "core": {"core"},
    "kernels": {"core", "kernels"},
    "models": {"core", "models"},
    "targets": {"core", "models", "targets"},
    "testing": {"core", "models", "targets", "testing"},
    "serving": {"core", "kernels", "models", "testing", "serving"},
    "training": {"core", "models", "targets", "training"},
    "bench": {"core", "models", "targets", "testing", "serving", "doctor", "bench"},
    "ablation": {"core", "models", "training", "bench", "ablation"},
    "plugin": {"core", "serving"},
    "doctor": {"core", "models", "targets", "serving", "plugin"},
    "cli": {"core", "models", "targets", "training", "ablation", "bench", "doctor"},
}
#: room -> distributions it may import beside the standard library; rooms not named here may use any but SGLang.
THIRD_PARTY: dict[str, set[str]] = {
    "__init__": set(),
    "core": {"torch"},
    "kernels": {"torch", "triton"},
    "models": {"torch", "transformers", "safetensors"},
    "targets": {"torch", "transformers", "safetensors", "gguf", "huggingface_hub", "httpx"},
    "doctor": {"torch"},
    "cli": {"demo"},
}
#: The adapter, and the entry points the host calls, which must work when the adapter cannot be imported.
MAY_IMPORT_SGLANG = {"serving", "plugin"}
#: Fused pieces have a room of their own; elsewhere only what FlashInfer or SGLang bring along is called.
MAY_IMPORT_TRITON = {"kernels"}
#: Files that may read environment variables: those the system or the host defines, never options of ours.
MAY_READ_ENVIRONMENT = {
    "targets/cache.py",  # XDG_CACHE_HOME
    "serving/platform/activation.py",  # SGLANG_PLATFORM, SGLANG_PLUGINS
    "testing/server.py",  # the environment handed to a server process
    "bench/environment.py",  # OMP_NUM_THREADS, reported with results
}


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            module = node.module or ""
            if module == "sglang_ext":
                yield from ((node.lineno, f"sglang_ext.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


@pytest.fixture(scope="module", params=FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def source(request: pytest.FixtureRequest) -> tuple[Path, ast.Module]:
    return request.param, ast.parse(request.param.read_text(encoding="utf-8"))


def test_every_room_is_in_the_table() -> None:
    assert {room_of(file) for file in FILES} <= ROOMS.keys()


def test_imports_follow_the_table(source: tuple[Path, ast.Module]) -> None:
    file, tree = source
    room = room_of(file)
    for line, name in imports(tree):
        top, _, rest = name.partition(".")
        where = f"{file.relative_to(ROOT)}:{line} imports {name}"
        if top == "sglang_ext":
            # `from sglang_ext import __version__` reads the package's own attribute.
            assert rest.startswith("__") or rest.split(".")[0] in ROOMS[room], where
        elif top == "sglang":
            assert room in MAY_IMPORT_SGLANG, where
        elif top == "triton":
            assert room in MAY_IMPORT_TRITON, where
        elif top not in sys.stdlib_module_names and room in THIRD_PARTY:
            assert top in THIRD_PARTY[room], where


def test_no_file_breaks_the_habits(source: tuple[Path, ast.Module]) -> None:
    file, tree = source
    name = file.relative_to(PACKAGE).as_posix()
    for node in ast.walk(tree):
        where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert not (node.func.id == "getattr" and len(node.args) == 3), f"{where}: getattr with a default"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{where}: bare except"
        if isinstance(node, ast.FunctionDef):
            assert node.name != "__getattr__", f"{where}: attribute forwarding hides renames"
        reads_environment = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        assert not reads_environment or name in MAY_READ_ENVIRONMENT, f"{where}: an option belongs in a flag or config"


def test_the_files_allowed_to_read_the_environment_do() -> None:
    for name in MAY_READ_ENVIRONMENT:
        assert "environ" in (PACKAGE / name).read_text(), f"{name} no longer needs its exception"


def test_every_module_and_public_function_says_what_it_is_for(source: tuple[Path, ast.Module]) -> None:
    file, tree = source
    assert ast.get_docstring(tree), f"{file.relative_to(ROOT)} has no docstring"
    for node in tree.body:
        public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if public:
            assert ast.get_docstring(node), f"{file.relative_to(ROOT)}:{node.lineno} {node.name} has no docstring"


def test_imports_inside_functions_count() -> None:
    found = imports(ast.parse("def f():\n    from sglang.srt import x\nimport sglang_ext.core.masks"))
    assert sorted(found) == [(2, "sglang.srt"), (3, "sglang_ext.core.masks")]


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import sglang_ext", ("torch", "sglang", "numpy", "transformers")),
        ("import sglang_ext.plugin", ("torch", "sglang", "numpy", "transformers")),
        ("import sglang_ext.cli", ("torch", "sglang", "transformers")),
        ("import sglang_ext.targets", ("torch", "sglang", "transformers")),
        ("import sglang_ext.core.masks, sglang_ext.core.accept", ("sglang", "transformers")),
        ("import sglang_ext.models.flexdraft.checkpoint, sglang_ext.models.shipped", ("sglang", "transformers")),
    ],
)
def test_imports_stay_cheap(statement: str, absent: tuple[str, ...]) -> None:
    check = f"import sys; {statement}; print(*[name for name in {absent!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
