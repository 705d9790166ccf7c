"""The GPU check runs end to end without a GPU, notices what is wrong, and packs into an archive that runs elsewhere."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("sglang")

import torch

from sglang_ext.core.block import mask_rows_mask
from sglang_ext.serving.attention import flashinfer_twin
from sglang_ext.serving.attention.flashinfer_calls import HeadShape, PagedCall

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "gpu"


def dry(arguments: list[str], script: Path = SCRIPTS / "check.py", **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(script), "--dry-run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_the_dry_run_goes_from_end_to_end(tmp_path: Path) -> None:
    run = dry(["--out", str(tmp_path)])
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(result["part"], result["ended"]) for result in results] == [
        (part, "ok") for part in ("environment", "compile", "kernels", "graphs", "pieces", "engine", "steps")
    ]
    rows = {result["part"]: result["rows"] for result in results}
    checked = {row["check"].split(" 64 ")[0].split(" 128 ")[0] for row in rows["kernels"]}
    forms = {f"{what} {form}" for what in ("parallel", "block") for form in ("merged", "masked", "groups")}
    assert checked == forms | {"tree merged", "tree masked", "verify chain", "verify tree"}
    assert all(row["ok"] for row in rows["kernels"])
    assert {row["form"] for row in rows["graphs"]} == {"merged", "masked", "groups"}
    assert {row["piece"] for row in rows["pieces"]} == {
        "slots of committed tokens", "places of rows in flight", "mask over everything", "mask over rows in flight",
        "greedy acceptance", "draft choice",
    }  # fmt: skip
    assert {row["server"] for row in rows["engine"] if "flexdraft" in row["server"]}
    assert rows["steps"][-1]["by_accept_length"]["4"] == 2.0
    assert rows["environment"][0]["argv"] == ["--dry-run", "--out", str(tmp_path)]
    report = (tmp_path / "report.md").read_text()
    assert all("two invented step times" in (tmp_path / name).read_text() for name in ("report.md", "speedup.svg"))
    assert "| parallel merged 128 bfloat16 bfloat16 | 2/2 |" in report
    assert "| draft choice | 4/4 |" in report
    assert "| parallel full eager | 1 | FlexDraft, GSM8K | 7.98 | 3.99 |" in report
    assert (tmp_path / "speedup.svg").read_text().count("<circle") == 2
    with tarfile.open(tmp_path / "logs.tar.gz") as logs:
        assert {"kernels.log", "steps.jsonl"} <= set(logs.getnames())
    for part in rows:
        assert f"{part:<12} ok" in run.stdout


@pytest.mark.parametrize("broken", ["merge", "bits", "slots"])
def test_wrong_kernels_fail_the_check(script, broken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "merge":
        monkeypatch.setattr(flashinfer_twin.TwinLibrary, "merge_state", lambda self, a, s, b, t: ((a + b) / 2, s))
    elif broken == "bits":
        monkeypatch.setattr("sglang_ext.serving.attention.flashinfer_calls._Call._after_plan", lambda self, mask: None)
    else:
        plan = PagedCall.plan
        monkeypatch.setattr(PagedCall, "plan", lambda self, q, k, s, m=None: plan(self, q, k, s.flip(0), m))
    setting = script("setting").Setting(True, tmp_path, tmp_path)
    rows = script("setting").Rows(setting, "kernels")
    script("part_kernels").run(setting, rows)
    assert not rows.ok
    assert len((tmp_path / "kernels.jsonl").read_text().splitlines()) == len(rows.rows)


def test_a_part_without_a_gpu_or_without_time_is_reported(script, tmp_path: Path) -> None:
    check = script("check")
    crashed = check.supervise("graphs", 120, tmp_path, tmp_path, False, [])
    cut = check.supervise("kernels", 0.05, tmp_path, tmp_path, True, [])
    assert crashed["ended"] == "crashed"
    assert cut["ended"].startswith("cut after")
    text = check.table(
        [crashed, cut, {"part": "steps", "ended": "failed", "seconds": 1, "rows": [{"ok": False, "x": 7}]}]
    )
    assert "crashed" in text
    assert '{"ok": false, "x": 7}' in text


def test_an_unknown_argument_of_sglang_is_noticed(script, tmp_path: Path) -> None:
    engines = script("engines")
    with pytest.raises(ValueError, match=r"no arguments \['atention_backend'\]"):
        engines.check_args({"model_path": "x", "atention_backend": "flashinfer"})


def test_a_gap_is_measured_at_the_first_difference(script) -> None:
    gap = script("part_engine")._gap
    plain = {
        "output_ids": [4, 5, 6],
        "meta_info": {"output_top_logprobs": [[], [[-0.5, 5, None], [-0.75, 9, None]], []]},
    }
    assert gap(plain, {"output_ids": [4, 5, 6]}) == 0
    assert gap(plain, {"output_ids": [4, 9, 1]}) == 0.25
    assert gap(plain, {"output_ids": [4, 8, 6]}) == float("inf")


def test_speedups(script) -> None:
    assert script("part_steps").speedup(3.0, 6.0, 4) == 2.0


def test_steps_are_timed_without_the_prefill_and_a_server_cut_short_keeps_what_it_has(script, tmp_path: Path) -> None:
    steps, servers = script("part_steps"), script("servers")
    server = steps.server({}, {"parallel full eager": {"mode": "parallel"}})
    taken = {"warm": 9.0, "short": 1.5, "long": 1.5 + 0.004 * (steps.LONG - steps.SHORT)}
    answers = [
        {"seconds": taken[timing.kind], "answers": [{"output_ids": [1] * ask.tokens, "meta_info": {}}] * timing.batch}
        for timing, ask in zip(server.timings, server.job.asks, strict=True)
    ]
    cut = answers[: len(list(steps.kinds())) + 2]
    rows = script("setting").Rows(script("setting").Setting(True, tmp_path, tmp_path), "steps")
    found = steps.measured(rows, "flexdraft", server, servers.Outcome({"memory_gb": 20.0}, cut, "cut after 90 s"))
    assert found == {("parallel full eager", 1): pytest.approx(4.0)}
    assert rows.rows[0]["ok"] is False
    assert {name: steps.floor_ms(name) for name in ("plain graphs", "parallel pruned eager", "dflash eager")} == {
        "plain graphs": 3.15, "parallel pruned eager": 3.45, "dflash eager": None,
    }  # fmt: skip


def test_a_server_that_dies_or_hangs_keeps_the_answers_it_gave(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = script("servers")
    python = tmp_path / "python"
    monkeypatch.setattr(servers.sys, "executable", str(python))
    found = {}
    for name, then in {"dies": "echo 'ValueError: no kernel'; exit 3", "hangs": "exec sleep 600"}.items():
        python.write_text(
            f"""#!/bin/sh\necho '{{"start_seconds": 1}}' > "$3"\necho '{{"name": "a"}}' >> "$3"\n{then}\n"""
        )
        python.chmod(0o755)
        found |= servers.ask_all({name: servers.Job({}, [])}, tmp_path, at_once=2, limit=5)
    assert {name: outcome.error for name, outcome in found.items()} == {
        "dies": "exit 3: ValueError: no kernel", "hangs": "cut after 5 s",
    }  # fmt: skip
    assert all(outcome.start and outcome.answers == [{"name": "a"}] for outcome in found.values())
    servers.end_all(tmp_path)
    assert not (tmp_path / servers.PIDS).exists()


def test_time_that_is_left_goes_to_later_parts_but_not_past_the_total(script) -> None:
    check = script("check")
    assert sum(check.PARTS.values()) <= 570
    found = dict(check.limits(list(check.PARTS), 1.0, 100))
    assert found["environment"] == pytest.approx(check.PARTS["environment"], abs=1)
    assert found["steps"] == pytest.approx(100, abs=1), "nothing was spent before"


def test_wheels_take_precedence_and_only_what_is_needed_of_them_is_packed(script, tmp_path: Path) -> None:
    make_bundle = script("make_bundle")
    wheel = tmp_path / "wheels" / "sglang_kernel-0.4.5-cp310-abi3-linux_x86_64.whl"
    wheel.parent.mkdir()
    kept = {"sgl_kernel/__init__.py", "sgl_kernel/sm90/common_ops.abi3.so", "sglang_kernel-0.4.5.dist-info/RECORD"}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*kept, "sgl_kernel/flash_ops.abi3.so", "sglang_kernel-0.4.5.data/purelib/beside.py"):
            archive.writestr(name, "x")
    bundle = make_bundle.Bundle()
    (found,) = make_bundle.wheels_in([wheel.parent])
    assert make_bundle.add_wheel(bundle, found, tmp_path) == "sglang-kernel"
    assert set(bundle.files) == kept | {"beside.py"}
    with pytest.raises(SystemExit, match="not a wheel"):
        make_bundle.wheels_in([tmp_path / "none"])
    assert "sglang-kernel==0.4.5" in make_bundle.download_command(["sglang-kernel==0.4.5"])


def test_a_bundle_runs_where_nothing_is_installed_from_here(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The project's own part of the archive: unpacked elsewhere it is what runs, and the host finds the plugin."""
    make_bundle = script("make_bundle")
    monkeypatch.setitem(make_bundle.SETS, "kernels", ["json"])
    archive = tmp_path / "bundle.tar.xz"
    assert make_bundle.main(["--out", str(archive), "--preset", "0"]) == 0
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    top = tmp_path / "bundle"
    assert not list(top.rglob("*.safetensors"))
    out = tmp_path / "results"
    run = dry(
        ["--out", str(out), "--only", "environment", "kernels"], top / "scripts/gpu/check.py", PYTHONPATH=str(top)
    )
    assert run.returncode == 0, run.stdout + run.stderr
    where = "import sglang_ext; from importlib.metadata import entry_points; " \
            "print(sglang_ext.__file__, *entry_points(group='sglang.srt.plugins', name='sglang_ext'))"  # fmt: skip
    seen = subprocess.run(
        [sys.executable, "-c", where],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(top)},
        cwd=tmp_path,
    )
    assert str(top) in seen.stdout
    assert "sglang_ext.plugin:register" in seen.stdout


def test_the_archive_has_what_flashinfer_needs_and_names_what_it_lacks(script, tmp_path: Path) -> None:
    pytest.importorskip("flashinfer")
    make_bundle = script("make_bundle")
    bundle = make_bundle.collect("kernels", [], None, tmp_path)
    names = set(bundle.files)
    assert {"flashinfer/prefill.py", "flashinfer/cascade.py", "flashinfer/data/csrc/batch_prefill.cu",
            "flashinfer/data/include/flashinfer/attention/prefill.cuh", "sglang_ext/core/masks.py",
            "scripts/gpu/check.py"} <= names  # fmt: skip
    assert not [name for name in names if "__pycache__" in name or name.startswith(("torch/", "flashinfer/moe_ep/"))]
    assert any("tvm-ffi" in name for name in bundle.missing), "its extension module depends on the Python version"
    assert any(name.startswith("flashinfer/data/cccl/libcudacxx/include/cuda/") for name in names), "to compile there"
    assert make_bundle._wanted("sglang/srt/rust_extensions/torch_build.py", Path(__file__)), "a server's cache asks it"
    prebuilt = tmp_path / "modules" / "cached_ops" / "some_uri"
    prebuilt.mkdir(parents=True)
    (prebuilt / "some_uri.so").write_bytes(b"x")
    (tmp_path / "modules" / "stubs").mkdir()
    (tmp_path / "modules" / "stubs" / "libcuda.so").write_bytes(b"x")
    make_bundle.add_prebuilt(bundle, tmp_path / "modules")
    assert [name for name in bundle.files if "/aot/" in name] == ["flashinfer/data/aot/some_uri/some_uri.so"]


@pytest.mark.parametrize("seed", range(12))
def test_two_intervals_say_what_the_mask_says(script, seed: int) -> None:
    picked = random.Random(seed)
    committed = [picked.randint(1, 40) for _ in range(3)]
    widths = [picked.randint(0, 5) for _ in committed]
    groups = [picked.randint(0, max(width, 1)) for width in widths]
    groups[0] = max(groups[0], 1)
    shape = HeadShape(4, 2, 64, 0.125, torch.float32, torch.float32)
    case = script("cases").Case(shape, committed, widths, groups, 3, "cpu", seed=seed)
    table = script("row_intervals").interval_table(case)
    keys = max(case.lengths)
    seen = mask_rows_mask(case.layout, keys)
    row = 0
    for i, (length, own) in enumerate(zip(case.lengths, case.layout.mask.carried)):
        for query in range(own):
            first, count, second, more = table[row].tolist()
            key = torch.arange(length + own)
            found = ((key >= first) & (key < first + count)) | ((key >= second) & (key < second + more))
            assert torch.equal(found, torch.cat([seen[i, query, :length], seen[i, query, keys : keys + own]]))
            assert found[: committed[i]].all(), "keys that the kernel may take without looking"
            row += 1
    assert row == table.shape[0]


def test_a_toolkit_is_found_where_it_is_named(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert script("compile_kernels").find_cuda() == tmp_path


def test_hosts_have_what_their_packages_require(script) -> None:
    have = script("make_bundle").host_distributions()
    assert {"torch", "transformers", "numpy", "safetensors"} <= have
    assert "sglang" not in have
