"""Checks everything that only a GPU can tell, in one run of less than ten minutes.

    python scripts/gpu/check.py --out results          # on a machine with a GPU
    python scripts/gpu/check.py --out results --dry-run  # small cases on a CPU: imports, plans, arguments

Parts run in this order, each in a process of its own with a time limit; a part that fails or is cut short does not stop
the others, and one that takes less than its time leaves the rest to those behind it. After every part the results so
far are written: results.json, report.md and speedup.svg; logs.tar.gz follows at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

#: Part -> seconds it may take, in the order they run; together below ten minutes.
PARTS = {"environment": 30, "compile": 155, "kernels": 50, "graphs": 60, "pieces": 35, "engine": 85, "steps": 155}
DRY_SLACK = 5
"""A dry run may be on a slow or busy machine."""
PACKAGES = ("torch", "triton", "sglang", "flashinfer-python", "apache-tvm-ffi", "sglang-kernel", "transformers",
            "numpy", "sglang-flexdraft")  # fmt: skip
NEEDED_KERNELS = (0, 4, 9)
"""SGLang refuses an older sglang-kernel by its version; hosts with an older torch need one, and Qwen3 runs on it."""
ROOT = Path(__file__).resolve().parents[2]
"""The project's folder, or the top of an unpacked archive."""


def environment(rows: Any, dry: bool, arguments: list[str]) -> None:
    """Note what is run, by which versions, on what."""
    import torch

    rows.add(argv=arguments, source=source())
    for name in PACKAGES:
        rows.add(package=name, version=installed(name))
    device = "none" if dry else torch.cuda.get_device_name()
    capability = None if dry else list(torch.cuda.get_device_capability())
    rows.add(python=platform.python_version(), device=device, capability=capability, cuda=torch.version.cuda,
             memory_gb=None if dry else round(torch.cuda.get_device_properties(0).total_memory / 1e9, 1),
             cpus=os.cpu_count(), machine=platform.platform(), at=time.strftime("%Y-%m-%d %H:%M:%S %Z"))  # fmt: skip
    for tool in (["nvcc", "--version"], ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm", "--format=csv"]):
        path = shutil.which(tool[0])
        run = subprocess.run([path, *tool[1:]], capture_output=True, text=True) if path else None
        rows.add(tool=tool[0], path=path, says=run.stdout.strip().splitlines()[-2:] if run else None)


def source() -> str:
    """Return the commit that is run: the archive's, or the checkout's."""
    for mark in ROOT.glob("sglang_flexdraft-*.dist-info/SOURCE"):
        return mark.read_text().strip()
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    return "unknown"


def installed(name: str) -> str | None:
    """Return a distribution's version, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def run_part(part: str, out: Path, work: Path, dry: bool, arguments: list[str]) -> int:
    """Run one part in this process; return the exit status."""
    sys.path.insert(0, str(ROOT))
    from setting import Rows, Setting

    setting = Setting(dry, out, work)
    rows = Rows(setting, part)
    if part == "environment":
        environment(rows, dry, arguments)
    else:
        importlib.import_module(f"part_{part}").run(setting, rows)
    return 0 if rows.ok else 1


def environ(part: str, dry: bool) -> dict[str, str]:
    """Return the environment of a part: what a host without a network and without an activated venv lacks."""
    found = dict(os.environ)
    if dry and part == "pieces":
        found["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    # FlashInfer looks for ninja and nvcc on the path, which a venv that was not activated is not on.
    found["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{found.get('PATH', os.defpath)}"
    # Servers are processes of their own, and find this package and its entry points by themselves.
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [found.get("PYTHONPATH")])])
    found |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    kernels = installed("sglang-kernel")
    if kernels is not None and tuple(int(part) for part in kernels.split(".")[:3] if part.isdigit()) < NEEDED_KERNELS:
        found["SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"] = "1"
    if not dry and "CUDA_HOME" not in found:
        from compile_kernels import find_cuda

        with contextlib.suppress(SystemExit):  # without a compiler, prebuilt kernels still run
            found["CUDA_HOME"] = str(find_cuda())
            found["PATH"] += f"{os.pathsep}{found['CUDA_HOME']}/bin"
    return found


def supervise(part: str, limit: float, out: Path, work: Path, dry: bool, arguments: list[str]) -> dict[str, Any]:
    """Run one part in a process of its own and say how it ended."""
    from servers import end_all

    command = [sys.executable, str(Path(__file__).resolve()), "--part", part, "--out", str(out), "--work", str(work)]
    if dry:
        command.append("--dry-run")
    command += ["--arguments", json.dumps(arguments)]
    started = time.perf_counter()
    with (work / f"{part}.log").open("w") as log:
        # A process group of its own: whatever a part has started ends with it.
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environ(part, dry), start_new_session=True
        )
        try:
            status = process.wait(limit)
            ended = {0: "ok", 1: "failed"}.get(status, f"exit {status}")
        except subprocess.TimeoutExpired:
            ended = f"cut after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end_all(work)
    results = work / f"{part}.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    if ended == "failed" and all(row.get("ok", True) for row in rows):
        ended = "crashed"
    return {"part": part, "ended": ended, "seconds": round(time.perf_counter() - started, 1), "rows": rows}


def limits(chosen: list[str], slack: float, total: float) -> Iterator[tuple[str, float]]:
    """Yield each part with the seconds it may take: its own, what those before it left, and never past the total."""
    started, planned = time.perf_counter(), 0.0
    for part in chosen:
        planned += PARTS[part] * slack
        yield part, max(min(planned, total) - (time.perf_counter() - started), 1.0)


def table(results: list[dict[str, Any]]) -> str:
    """One line per part, then one per failed result."""
    lines = [f"{'part':<12} {'ended':<16} {'seconds':>8} {'results':>8} {'failed':>7}"]
    failures = []
    for result in results:
        failed = [row for row in result["rows"] if not row.get("ok", True)]
        failures += [f"  {result['part']}: {json.dumps(row)}" for row in failed]
        lines.append(
            f"{result['part']:<12} {result['ended']:<16} {result['seconds']:>8} {len(result['rows']):>8} "
            f"{len(failed):>7}"
        )
    return "\n".join([*lines, *failures])


def write_results(results: list[dict[str, Any]], out: Path) -> None:
    """Write what there is so far."""
    import report

    (out / "results.json").write_text(json.dumps(results, indent=1))
    (out / "report.md").write_text(f"{report.markdown(results)}\n## Parts\n\n```\n{table(results)}\n```\n")
    picture = report.picture(results)
    if picture:
        (out / "speedup.svg").write_text(picture)


def pack_logs(work: Path, out: Path) -> None:
    """Put everything the parts have printed into one file."""
    with tarfile.open(out / "logs.tar.gz", "w:gz") as archive:
        for file in sorted(work.glob("*.log")) + sorted(work.glob("*.jsonl")):
            archive.add(file, file.name)


def main(arguments: list[str] | None = None) -> int:
    """Run the parts asked for; the exit status is 0 if all of them are ok."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-results"), help="folder for results (default: %(default)s)"
    )
    parser.add_argument("--work", type=Path, help="folder for logs and temporary files (default: work in --out)")
    parser.add_argument("--dry-run", action="store_true", help="small cases on a CPU instead of the GPU")
    parser.add_argument("--slack", type=float, default=1.0, help="multiply every part's time limit (default: 1)")
    parser.add_argument("--total", type=float, default=570, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, default=[], help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    out = args.out.resolve()
    work = args.work.resolve() if args.work else out / "work"
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    if args.part:
        return run_part(args.part, out, work, args.dry_run, args.arguments)
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = [part for part in PARTS if not args.only or part in args.only]
    slack, total = (DRY_SLACK, float("inf")) if args.dry_run else (args.slack, args.total * args.slack)
    results: list[dict[str, Any]] = []
    for part, limit in limits(chosen, slack, total):
        results.append(supervise(part, limit, out, work, args.dry_run, given))
        write_results(results, out)
        print(table(results[-1:]), flush=True)
    pack_logs(work, out)
    print(table(results))
    return 0 if all(result["ended"] == "ok" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
