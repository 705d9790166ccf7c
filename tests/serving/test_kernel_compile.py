"""Kernels compile without a GPU: this package's own for both GPUs, FlashInfer's a file at a time where there is nvcc.

The whole table of what compiled is ``docs/results/kernels-compile.json``; ``scripts/gpu/compile_kernels.py`` makes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "gpu"
RESULTS = ROOT / "docs" / "results"


def compiled(name: str, results: Path, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    """Run a compile script and return its table."""
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), *arguments, "--results", str(results)]
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environ |= {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"}
    run = subprocess.run(command, capture_output=True, text=True, env=environ | environment)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    return json.loads(results.read_text())["rows"]


def needs_nvcc(script) -> None:
    pytest.importorskip("flashinfer")
    try:
        script("compile_kernels").find_cuda()
    except SystemExit as reason:
        pytest.skip(str(reason))


def test_the_packages_own_kernels_compile_as_they_are_launched(script, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    rows = compiled("compile_triton", tmp_path / "table.json", TRITON_CACHE_DIR=str(tmp_path / "cache"))
    for arch in script("compile_triton").TARGETS.values():
        mine = [row for row in rows if row["arch"] == arch]
        assert {row["kernel"].split(".")[0] for row in mine} == set(script("compile_triton").PIECES)
        assert all(row["ok"] and row["bytes"] for row in mine)
    assert set(script("compile_triton").PIECES) == {
        file.stem for file in (ROOT / "sglang_ext" / "kernels").glob("[a-z]*.py") if file.stem != "language"
    }


def test_a_kernel_with_a_custom_mask_compiles_for_hopper(script, tmp_path: Path) -> None:
    needs_nvcc(script)
    unit = ("--only", "bf16-64", "--units", "ragged_kernel_mask_2")
    rows = compiled("compile_kernels", tmp_path / "table.json", "--out", str(tmp_path), *unit)
    assert [(row["arch"], row["variant"], row["ok"]) for row in rows] == [("sm_90a", "bf16-64", True)]
    assert rows[0]["holds"] in (["sm_90a"], None)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["9.0a", "10.0a"])
def test_the_usual_variants_compile(script, arch: str, tmp_path: Path) -> None:
    """Every call over 16 bit and 8 bit pools, the merge and the candidate, for one GPU; minutes."""
    needs_nvcc(script)
    unit = ("--only", "bf16-128", "bf16-e4m3-128", "--arch", arch)
    rows = compiled("compile_kernels", tmp_path / "table.json", "--out", str(tmp_path), *unit)
    assert len(rows) == 5 + 3 + 2 + 1
    assert all(row["ok"] for row in rows)


def test_variants_are_those_that_start_up_lets_through(script) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("sglang")
    from sglang_ext.core.refusal import Refusal
    from sglang_ext.serving.attention.flashinfer_calls import HEAD_SIZES, KEY_DTYPES, QUERY_DTYPES, HeadShape

    module = script("compile_kernels")
    allowed = set()
    for head in HEAD_SIZES:
        for query in QUERY_DTYPES:
            for pool in KEY_DTYPES:
                try:
                    HeadShape(8, 2, head, 1.0, query, pool).check()
                except Refusal:
                    continue
                allowed.add(((query, pool, query), head))
    assert {module.variant_types(name) for name in module.VARIANTS} == allowed
    assert torch.float8_e5m2 in {types[1] for types, _ in allowed}


def test_a_kernel_that_does_not_compile_is_a_failed_row(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, kept = script("compile_kernels"), script("compile_results")
    monkeypatch.setattr(module, "served_spec", lambda name: name)
    broken = "bf16-64"

    def compile_unit(spec: str, unit: str) -> tuple[Path, str | None]:
        target = tmp_path / f"{spec}-{unit}.o"
        target.write_bytes(b"123")
        return target, "error: no" if spec == broken else None

    monkeypatch.setattr(module, "compile_unit", compile_unit)
    monkeypatch.setattr(module, "architectures", lambda target: ["sm_90a"])
    file = tmp_path / "table.json"
    unit = ["paged_kernel_mask_0"]
    assert not module.compile_files("9.0a", ["bf16-128", broken], unit, kept.Results(file, {"run": "first"}))
    rows = json.loads(file.read_text())["rows"]
    assert {row["variant"]: (row["ok"], row["bytes"]) for row in rows} == {"bf16-128": (True, 3), broken: (False, None)}
    # A later run leaves out what has compiled, tries the rest again and keeps one row for it.
    broken = "none"
    assert module.compile_files("9.0a", ["bf16-128", "bf16-64"], unit, kept.Results(file, {"run": "second"}))
    table = json.loads(file.read_text())
    assert [row["run"] for row in table["rows"]] == [0, 1]
    assert all(row["ok"] for row in table["rows"])
    # Code for another GPU than the one asked for is a failure too.
    assert not module.compile_files("10.0a", ["bf16-128"], unit, kept.Results(None, {}))


@pytest.mark.parametrize("name", ["kernels-compile", "triton-compile"])
def test_everything_in_the_committed_tables_compiled(script, name: str) -> None:
    table = json.loads((RESULTS / f"{name}.json").read_text())
    assert {row["arch"] for row in table["rows"]} == {"sm_90a", "sm_100a"}
    assert all(row["ok"] and row["bytes"] for row in table["rows"])
    for run in table["runs"]:
        assert run["git"]
        assert not [word for word in run["argv"] if word.startswith("/")], "no folder of any machine"
